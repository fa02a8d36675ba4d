"""Names that are no keys: those of TRL, verl and OpenRLHF, and former keys. A message about one says which key it is.

actor_rollout_ref.actor.optim.lr ──the longest ending in the table: optim.lr──> training.lr
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

TRAINERS = ("TRL", "verl", "OpenRLHF")
# A key, with a remark if more than the name differs | its names in TRL | in verl | in OpenRLHF. A dot in a name also
# stands for an underscore: OpenRLHF's flags of today have sections, those of 2025 did not.
SAME = """
run.name | run_name | experiment_name | wandb_run_name
run.dir | output_dir | default_local_dir | ckpt.output_dir ckpt.path save_path
run.seed | seed
run.steps | max_steps | total_training_steps
run.epochs | num_train_epochs | total_epochs | num_episodes
run.resume | resume_from_checkpoint | resume_mode | ckpt.load_enable load_checkpoint
model.path | | | actor.model_name_or_path pretrain
model.tokenizer | | tokenizer_path
model.chat_template | | custom_chat_template
model.trust_remote_code | | trust_remote_code
model.lora.rank | | lora_rank | lora.rank
model.lora.alpha | | lora_alpha | lora.alpha
model.lora.targets | | target_modules | lora.target_modules
data.train.path | | train_files | data.prompt_dataset prompt_data
data.train.split | | | prompt_split
data.train.size | | train_max_samples | max_samples
data.train.prompt_column | | prompt_key | input_key
data.train.answer_column | | | label_key
data.eval.path | | val_files | eval.dataset
data.eval.size | | val_max_samples
data.max_prompt_length | | prompt_length | prompt_max_len
data.max_prompt_length (longer prompts are always dropped) | | filter_overlong_prompts
data.shuffle | shuffle_dataset
workflow | | rollout.multi_turn rollout.multi_turn.enable | train.agent_func_path agent_func_path
algorithm.adv_estimator | | | advantage.estimator
algorithm.adv_estimator (gdpo: normalize, then sum) | multi_objective_aggregation
algorithm.adv_estimator (dr_grpo: without the standard deviation) | scale_rewards | norm_adv_by_std_in_grpo
algorithm.adv_estimator (dr_grpo: without the standard deviation) | | | no_std_norm no_advantage_std_norm
algorithm.policy_loss | | policy_loss.loss_mode | policy_loss_type
algorithm.policy_loss (sequence: gspo) | importance_sampling_level
algorithm.loss_aggregation | | loss_agg_mode
algorithm.loss_aggregation (or algorithm.preset; DPO: objective) | loss_type
algorithm.clip_ratio_low | epsilon
algorithm.clip_ratio_low (and algorithm.clip_ratio_high) | | clip_ratio | eps_clip eps_clip_low_high
algorithm.clip_ratio_high | epsilon_high
algorithm.clip_ratio_dual | delta | clip_ratio_c | dual_clip
algorithm.sapo_tau (of positive and of negative advantages) | sapo_temperature_pos sapo_temperature_neg | tau_pos
algorithm.sapo_tau (of positive and of negative advantages) | | tau_neg
algorithm.gae_lambda | | lam | lambd
algorithm.kl_coef | | kl_loss_coef kl_ctrl.kl_coef | kl.init_coef init_kl_coef
algorithm.kl_coef (DPO: preference.beta) | beta
algorithm.kl_estimator | | kl_loss_type kl_penalty | kl.estimator
algorithm.kl_in (loss or reward; the KL is on if algorithm.kl_coef is above 0) | | use_kl_loss use_kl_in_reward
algorithm.kl_in (loss or reward; the KL is on if algorithm.kl_coef is above 0) | | | kl.use_loss
algorithm.adaptive_kl (target) | | kl_ctrl.type
algorithm.adaptive_kl.target | | kl_ctrl.target_kl | kl.target
algorithm.adaptive_kl.horizon | | kl_ctrl.horizon | kl.horizon
algorithm.entropy_coef | | entropy_coeff | entropy_loss_coef
algorithm.importance.level | vllm_importance_sampling_correction | rollout_is | is_correction_enable
algorithm.importance.level | | | enable_vllm_is_correction
algorithm.importance.level (and algorithm.importance.mode) | vllm_importance_sampling_mode
algorithm.importance.cap | vllm_importance_sampling_clip_max | rollout_is_threshold | is_correction_threshold
algorithm.importance.cap | | | vllm_is_truncated_threshold
algorithm.importance.floor | vllm_importance_sampling_clip_min
algorithm.overlong.buffer | | overlong_buffer.len | overlong_buffer_len
algorithm.overlong.penalty | | overlong_buffer.penalty_factor | overlong_penalty_factor
algorithm.overlong.mask | mask_truncated_completions
algorithm.mini_batches (their number per step, not their size) | steps_per_generation | ppo_mini_batch_size
algorithm.mini_batches (their number per step, not their size) | | | train.batch_size
algorithm.epochs (passes over the samples of a step) | num_iterations | ppo_epochs | max_epochs
generation.engine | use_vllm | rollout.name
generation.max_concurrent | | max_num_seqs
generation.gpu_memory_utilization | vllm_gpu_memory_utilization | gpu_memory_utilization
generation.tensor_parallel | vllm_tensor_parallel_size | tensor_model_parallel_size | vllm.tensor_parallel_size
generation.eager | | enforce_eager
generation.max_response_length | max_completion_length | response_length max_response_length | max_new_tokens
generation.max_response_length | | | generate_max_len
generation.max_response_length (of the answer; of the prompt: data.max_prompt_length) | max_length | | max_len
generation.temperature | temperature
generation.top_p | | top_p
generation.top_k | | top_k
generation.sleep | vllm_enable_sleep_mode | free_cache_engine | vllm.enable_sleep
rewards.functions | | custom_reward_function
rewards.functions.weight | reward_weights
rewards.functions.path (file.py:NAME) | | custom_reward_function.path custom_reward_function.name
rewards.models.model.path | | reward_model.model.path | reward.model_name_or_path reward_pretrain
rewards.http (or rewards.functions) | | | reward.remote_url remote_rm_url
sampling.prompts_per_step (this number / samples_per_prompt) | generation_batch_size
sampling.prompts_per_step (prompts of a step, over all devices) | | train_batch_size | rollout.batch_size
sampling.prompts_per_step (per device x devices x gradient accumulation / samples) | per_device_train_batch_size
sampling.samples_per_prompt | num_generations | rollout.n | n_samples_per_prompt group_size
sampling.filter | | filter_groups
sampling.filter (spread) | | filter_groups.enable | dynamic_filtering dynamic_filtering_enable
sampling.max_draws | | filter_groups.max_num_gen_batches
sampling.oversampling | | gen_batch_size
sampling.max_staleness | | | async_train async_enable
training.backend | | actor.strategy
training.device | use_cpu
training.dtype | | | ds.param_dtype
training.dtype (weights stay in float32) | bf16
training.lr | learning_rate | optim.lr | actor.adam.lr actor_learning_rate
training.schedule | lr_scheduler_type | lr_scheduler_type warmup_style | lr_scheduler
training.warmup_steps | warmup_steps | lr_warmup_steps
training.warmup_steps (a number of updates) | | lr_warmup_steps_ratio | lr_warmup_ratio
training.min_lr_ratio | | min_lr_ratio
training.betas | adam_beta1 adam_beta2 | optim.betas | adam.betas
training.eps | adam_epsilon
training.weight_decay | weight_decay | | l2
training.vision_lr (0: frozen) | | freeze_vision_tower | freeze_visual_encoder
training.max_grad_norm | max_grad_norm | clip_grad grad_clip | max_norm
training.max_tokens_per_gpu | | ppo_max_token_len_per_gpu | train_max_tokens_per_gpu
training.max_tokens_per_gpu (in tokens: micro-batches follow from it) | gradient_accumulation_steps
training.max_tokens_per_gpu (in tokens: micro-batches follow from it) | | ppo_micro_batch_size
training.max_tokens_per_gpu (in tokens: micro-batches follow from it) | | ppo_micro_batch_size_per_gpu
training.max_tokens_per_gpu (in tokens: micro-batches follow from it) | | | micro_train_batch_size
training.max_tokens_per_gpu (in tokens: micro-batches follow from it) | | | train.micro_batch_size
training.max_tokens_per_gpu (in tokens: micro-batches follow from it) | | | micro_rollout_batch_size
training.max_tokens_per_gpu (in tokens: micro-batches follow from it) | | | rollout.micro_batch_size
training.context_parallel | | ulysses_sequence_parallel_size | ring_attn_size
training.compile | torch_compile | use_torch_compile
training.activation_checkpointing | gradient_checkpointing | enable_gradient_checkpointing
training.activation_checkpointing | | | gradient_checkpointing_enable
training.offload | | param_offload optimizer_offload | adam_offload
critic.model.path | | critic.model.path | critic.model_name_or_path critic_pretrain
critic.lr | | critic.optim.lr | critic.adam.lr critic_learning_rate
critic.warmup_steps | | critic_warmup | critic.freezing_steps freezing_actor_steps
critic.value_clip | | cliprange_value | value_clip
critic.max_grad_norm | | critic.grad_clip
placement.mode | vllm_mode | | colocate_all colocate_all_models
placement.policy.replicas | | | vllm.num_engines
placement.trainer.ranks (by default one per GPU) | | n_gpus_per_node nnodes | actor.num_gpus_per_node
placement.trainer.tensor_parallel | | actor.megatron.tensor_model_parallel_size | ds.tensor_parallel_size
placement.trainer.pipeline_parallel | | actor.megatron.pipeline_model_parallel_size
placement.trainer.shard | | fsdp_size | zero_stage
checkpoint.every | save_steps | save_freq
checkpoint.keep_last | save_total_limit | max_actor_ckpt_to_keep | ckpt.max_num max_ckpt_num
checkpoint.keep_best | load_best_model_at_end
checkpoint.best_metric | metric_for_best_model | | ckpt.best_metric_key
evaluation.samples | num_generations_eval | val_kwargs.n | eval.n_samples_per_prompt
evaluation.temperature | | val_kwargs.temperature | eval.temperature
evaluation.top_p | | val_kwargs.top_p
evaluation.top_k | | val_kwargs.top_k
observe.eval_every | eval_steps | test_freq | eval.steps
observe.eval_every (there is always an evaluation before the first step) | | val_before_train
observe.trackers (a list) | | | use_wandb
observe.trackers (a list of tensorboard, wandb, mlflow) | report_to | trainer.logger
observe.samples_per_step | log_completions
"""
FORMER = {  # keys that were removed or renamed, or that one could expect -> the key, or what to do
    "training.tensor_parallel": "placement.trainer.tensor_parallel",
    "algorithm.sapo_tau_positive": "algorithm.sapo_tau (two numbers: for positive and for negative advantages)",
    "algorithm.sapo_tau_negative": "algorithm.sapo_tau (two numbers: for positive and for negative advantages)",
    "algorithm.kl_target": "algorithm.adaptive_kl.target",
    "algorithm.kl_horizon": "algorithm.adaptive_kl.horizon",
    "algorithm.entropy_target": "algorithm.adaptive_entropy.target",
    "algorithm.entropy_change": "algorithm.adaptive_entropy.change",
    "algorithm.importance_mode": "algorithm.importance.mode",
    "algorithm.importance_cap": "algorithm.importance.cap",
    "algorithm.importance_floor": "algorithm.importance.floor",
    "algorithm.overlong_buffer": "algorithm.overlong.buffer",
    "algorithm.overlong_penalty": "algorithm.overlong.penalty",
    "algorithm.mask_truncated": "algorithm.overlong.mask",
    "data.media.optional": "remove it: a model that takes media also reads datasets of text",
    "generation.denoising.window.stride": "generation.denoising.window.every (divide it by the stride)",
    "generation.device": "training.device (of all models of a run)",
    "generation.emulated.speed": "remove it, and divide all seconds of the emulated sections by it",
    "observe.mlflow": "observe.trackers (a list, such as [tensorboard, mlflow])",
    "observe.tensorboard": "observe.trackers (a list: [tensorboard] is the default, [] is none)",
    "observe.wandb": "observe.trackers (a list, such as [tensorboard, wandb])",
    "placement.critic.threads": "placement.trainer.threads (of trainer and critic ranks)",
    "placement.move_timeout_s": "run.hang_s (a move that takes longer is undone)",
    "placement.policy.threads": "remove it: an engine uses one CPU thread",
    "placement.poll_interval_s": "remove it: 0.25 s, or a hundredth of the last rollout",
    "rewards.judges.device": "training.device (of all models of a run)",
    "rewards.judges.emulated.speed": "remove it, and divide all seconds of the emulated sections by it",
    "rewards.models.device": "training.device (of all models of a run)",
    "rewards.models.max_tokens_per_batch": "remove it: 16,384 tokens",
    "sampling.curriculum.min_weight": "remove it: 0.1",
    "sampling.curriculum.newest": "remove it: 0.5",
    "sampling.curriculum.start": "remove it: 0.5",
    "training.emulated.speed": "remove it, and divide all seconds of the emulated sections by it",
}


def _names_by_answer() -> dict[str, dict[str, list[str]]]:
    table: dict[str, dict[str, list[str]]] = {}
    for row in SAME.strip().splitlines():
        answer, *cells = (cell.strip() for cell in row.split("|"))
        names = table.setdefault(answer, {trainer: [] for trainer in TRAINERS})
        for trainer, cell in zip(TRAINERS, cells, strict=False):
            names[trainer] += cell.split()
    return table


NAMES = _names_by_answer()  # {"training.lr": {"TRL": ["learning_rate"], ...}, ...}
TABLES = {trainer: {name: a for a, names in NAMES.items() for name in names[trainer]} for trainer in TRAINERS}
_ALL = {name: answer for table in reversed(TABLES.values()) for name, answer in table.items()}
_ANSWERS = {name.replace(".", "_"): answer for name, answer in _ALL.items()} | _ALL


def own_name(name: str, keys: Collection[str]) -> str | None:
    """The key, with its remark, for the name or the path of another trainer. `keys`: those of the command."""
    parts = name.split(".")
    for ending in (".".join(parts[i:]) for i in range(len(parts))):
        if key_of(_ANSWERS.get(ending, "")) in keys:
            return _ANSWERS[ending]
        if "." in ending and ending != name and ending in keys:  # actor_rollout_ref.model.path
            return ending
    same = [key for key in keys if key.rpartition(".")[2] == parts[-1]]
    return same[0] if len(same) == 1 and len(parts) > 1 else None  # actor_rollout_ref.actor.clip_ratio_low


def key_of(answer: str) -> str:
    """Without the remark."""
    return answer.partition(" ")[0]


def leaves(tree: Any, path: str) -> Iterator[str]:
    """The paths of the values in a section, such as that of another trainer's file."""
    if not isinstance(tree, dict) or not tree:
        yield path
        return
    for name, value in tree.items():
        yield from leaves(value, f"{path}.{name}")
