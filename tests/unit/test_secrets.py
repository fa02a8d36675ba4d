"""Secrets of a configuration are not in any file of a run, and nothing else is changed."""

from __future__ import annotations

import typing
from dataclasses import replace
from types import SimpleNamespace, UnionType
from typing import Any

import pytest
import yaml

from gcore.config.load import all_keys, dump_config, load_config, parse_yaml
from gcore.config.secrets import FREE_FORM, REDACTED, hide, learn, mask, places, redacted
from gcore.config.tree import Config
from gcore.controller import start_run
from gcore.observe.events import EventLog
from gcore.observe.progress import Progress
from gcore.observe.samples import SampleLog
from tests.e2e.helpers import write_recipe
from tests.unit.rollouts import scored

PLANTED = {
    "openai_key": "planted-01-abcd",
    "Authorization": "Token planted-02",
    "access_key_id": "planted-03",
    "passwd": "planted-04",
    "pwd": "planted-05",
    "credentials": {"user": "planted-06", "more": ["planted-07"]},
    "X-Auth": "planted-08",
    "Cookie": "id=planted-09",
    "api_key": "planted-10",
    "apiKey": "planted-11",
    "HFToken": "planted-12",
    "sas": "planted-13",
    "session_id": "planted-14",
    "client-secret": "planted-15",
    "aws_secret_access_key_2": "planted-16",
    "password": 20250131,
    "pin": 20250131,
    "dbPw": "planted-60",
    "passcode": "planted-61",
    "psk": "planted-62",
    "totp_otp": "planted-63",
    "key": "planted17planted17",
}
IN_TEXT = {
    "http://me:planted-20@host:80/x": f"http://{REDACTED}@host:80/x",
    "https://host/x?a=1&api_key=planted-21&b=2": f"https://host/x?a=1&api_key={REDACTED}&b=2",
    "https://a.blob.net/c?sv=2024&sig=planted-22%2B": f"https://a.blob.net/c?sv=2024&sig={REDACTED}",
    "s3://b/k?X-Amz-Credential=planted-23&X-Amz-Date=2": f"s3://b/k?X-Amz-Credential={REDACTED}&X-Amz-Date=2",
    "say hf_plantedplanted2400 twice": f"say {REDACTED} twice",
    "sk-proj-planted_planted25": REDACTED,
    "AKIAPLANTED26PLANTED": REDACTED,
    "ghp_planted27planted27planted": REDACTED,
    "Bearer planted-28-planted": f"Bearer {REDACTED}",
    "eyJplanted29.eyJplanted29.planted29": REDACTED,
    "https://hooks.slack.com/services/T0/B0/planted31planted": f"https://hooks.slack.com/services/{REDACTED}",
    "https://discord.com/api/webhooks/12/planted32planted": f"https://discord.com/api/webhooks/{REDACTED}",
    "X-Api-Key: planted-50": f"X-Api-Key: {REDACTED}",
    '{"x-goog-api-key": "planted-51", "a": 1}': f'{{"x-goog-api-key": "{REDACTED}", "a": 1}}',
    "curl -H 'Authorization: Token planted-52' h": f"curl -H 'Authorization: Token {REDACTED}' h",
    "Authorization: ApiKey planted-53": f"Authorization: ApiKey {REDACTED}",
    "curl -s -u bob:planted https://h/x": f"curl -s -u bob:{REDACTED} https://h/x",
    "http://bob:p@planted-54@h/x": f"http://{REDACTED}@h/x",
    "http://bob:p/planted-55@h/x": f"http://{REDACTED}@h/x",
    "gsk_plantedplanted56": REDACTED,
    "r8_plantedplanted57": REDACTED,
    "npm_plantedplanted58": REDACTED,
    "pypi-planted_planted_planted-59": REDACTED,
    "SG.plantedplanted60.plantedplanted60": REDACTED,
    "https://api.telegram.org/bot110201543:planted-planted61/getMe": f"https://api.telegram.org/bot{REDACTED}/getMe",
    "-----BEGIN RSA PRIVATE KEY-----\nplanted30\n-----END RSA PRIVATE KEY-----\nx": f"{REDACTED}\nx",
}
INNOCENT = {
    "max_completion_tokens": 9,
    "token_penalty": 0.1,
    "use_auth_token": True,
    "tokenizer": "folder/of-1-tokenizer",
    "token_ids": [1, 2],
    "answer_key": "gold",
    "key": "answer",
    "keys": ["answer", "gold"],
    "sort_keys": ["b", "a"],
    "keyboard": "qwerty",
    "monkey": "see",
    "keep_best": "eval/accuracy",
    "pass": 1,
    "pass_rate": 0.5,
    "passage": "a text",
    "api_key_env": "OPENAI_API_KEY",
    "password_file": "/run/secrets/x",
    "author": "Ann",
    "authority": "x",
    "design": "a",
    "sigma": 0.8,
    "session_timeout": 30,
    "secretary": "x",
    "url": "http://host:80/v1?model=a&size=3#part",
    "ssh": "ssh://git@host/repo",
    "mail": "me@host",
    "nothing": None,
    "pinned": "a-1",
    "option": "spin-2",
    "pwm": 3,
    "header": "Authorization: required; x-key: short1",
    "port": "http://host:8000/a@b and [::1]:80/a@b, npm_config_registry_url",
    "docker": ["-u", "1000:1000", "curl -u 7", "pypi-publish"],
    "options": ["--max-tokens", "512", "--token-file", "a", "--tokenizer=x", "max_tokens=9", "key=answer", "-v", "x"],
    "text": "a task-driven risk-averse hf_model; Bearer of news, ask=1",
}


def of_args(recipe, args: dict[str, Any]) -> Config:
    tree = yaml.safe_load(recipe.read_text())
    tree["rewards"]["functions"][0]["args"] = args
    recipe.write_text(yaml.safe_dump(tree))
    return load_config(recipe)


def test_no_secret_is_in_the_file(tmp_path):
    texts = {f"text_{number}": text for number, text in enumerate(IN_TEXT)}
    config = of_args(write_recipe(tmp_path), {**PLANTED, **texts, "headers": {"Authorization": "x-planted"}})
    dumped = dump_config(config)
    assert "planted" not in dumped.lower() and "20250131" not in dumped
    args = parse_yaml(dumped)["rewards"]["functions"][0]["args"]
    assert [args[name] for name in texts] == list(IN_TEXT.values())
    assert args["credentials"] == {"user": REDACTED, "more": [REDACTED]}
    assert len(list(places(parse_yaml(dumped)))) == len(PLANTED) + 1 + len(texts) + 1


def test_options_of_commands_and_assignments(tmp_path):
    """In a configuration. Elsewhere, `token=x` is a part of a program."""
    given = ["--api-key=planted-40", "--token", "planted-41", "export DB_PASSWORD=planted-42"]
    given += ["curl", "-u", "bob:planted-44"]
    given.append("Endpoint=sb://x/;SharedAccessKeyName=n;SharedAccessKey=planted-43=")
    config = of_args(write_recipe(tmp_path), {"commands": given})
    expected = [f"--api-key={REDACTED}", "--token", REDACTED, f"export DB_PASSWORD={REDACTED}"]
    expected += ["curl", "-u", REDACTED]
    expected.append(f"Endpoint=sb://x/;SharedAccessKeyName=n;SharedAccessKey={REDACTED}")
    assert parse_yaml(dump_config(config))["rewards"]["functions"][0]["args"]["commands"] == expected
    assert hide("call(token=tokenizer, password=None)") == "call(token=tokenizer, password=None)"
    learn(config.model_dump(mode="json"))
    assert hide("got planted-42") == f"got {REDACTED}"


def test_nothing_else_is_changed(tmp_path):
    config = of_args(write_recipe(tmp_path), INNOCENT)
    assert parse_yaml(dump_config(config)) == config.model_dump(mode="json")
    assert redacted(redacted(PLANTED)) == redacted(PLANTED)


def test_names_of_our_own_are_no_secrets(tmp_path):
    """Evaluation sets and words of a verdict have names that the user chooses, but values that are ours."""
    sets = {name: {"task": "arithmetic"} for name in ("token", "auth", "password")}
    path = write_recipe(tmp_path, data={"train": {"task": "arithmetic"}, "eval": sets, "max_prompt_length": 12})
    config = load_config(path)
    assert parse_yaml(dump_config(config)) == config.model_dump(mode="json")


@pytest.mark.parametrize("tree", [Config])
def test_every_section_with_keys_of_the_user_is_known(tree):
    assert {key.rpartition(".")[2] for key in all_keys(tree) if is_free(tree, key)} <= set(FREE_FORM)


def is_free(tree: Any, key: str) -> bool:
    """Whether the values below this key have any type."""

    def fields(annotation: Any) -> list[Any]:
        if typing.get_origin(annotation) in (typing.Union, UnionType, list, typing.Annotated):
            return [found for part in typing.get_args(annotation) for found in fields(part)]
        return [annotation]

    found = [tree]
    for name in key.split("."):
        found = [
            annotation
            for section in found
            if hasattr(section, "model_fields") and name in section.model_fields
            for annotation in fields(section.model_fields[name].annotation)
        ]
    return any(typing.get_origin(one) is dict and typing.get_args(one)[1] is Any for one in found)


def test_texts_are_written_without_what_a_process_has_learned():
    tree = {"rewards": {"functions": [{"args": {"password": "correct horse", "key": "answer", "pwd": "short"}}]}}
    learn({**tree, "url": "postgres://me:planted-pass@db/x"})
    text = "got 'correct horse' and planted-pass, short answer\n"
    assert hide(text) == f"got '{REDACTED}' and {REDACTED}, short answer\n"
    assert mask(text.encode()) == text.replace("correct horse", 13 * "*").replace("planted-pass", 12 * "*").encode()
    for given, expected in IN_TEXT.items():
        assert hide(given) == expected and hide(expected) == expected
        assert len(mask(given.encode())) == len(given) and b"planted2" not in mask(given.encode()).lower()
        assert mask(mask(given.encode())) == mask(given.encode())


def test_a_token_in_the_environment_is_a_secret(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "planted-env-token")
    learn({"rewards": {"http": [{"token_env": "JUDGE_TOKEN"}]}})
    assert hide("with planted-env-token") == f"with {REDACTED}"


def test_what_a_run_writes_beside_its_logs(tmp_path, monkeypatch, capsys):
    config = of_args(write_recipe(tmp_path), {"password": 'planted "quoted" word'})
    given: list[Any] = []
    monkeypatch.setattr(start_run, "Recorder", lambda *_: None)
    monkeypatch.setattr(start_run, "MetricsWriter", lambda *args: given.append(args[-1]))
    modality, controllers = SimpleNamespace(hidden_steps=None), SimpleNamespace(rank=0)
    start_run._open_recorder(SimpleNamespace(config=config, controllers=controllers, modality=modality))
    assert given == [redacted(config.model_dump(mode="json"))] and "planted" not in str(given)  # for trackers
    text = 'it was planted "quoted" word'
    SampleLog(tmp_path, 0, 0, 1, 1).write(1, [0], [[with_note(text)]])
    EventLog(tmp_path).add("rollback", cause=text)
    with Progress("plain", "demo", 1) as progress:
        progress.note(text)
    shown = [capsys.readouterr().out, (tmp_path / "events.jsonl").read_text()]
    shown.append((tmp_path / "samples" / "controller-0.jsonl").read_text())
    assert all("planted" not in part and f"it was {REDACTED}" in part for part in shown), shown


def with_note(text: str) -> Any:
    found = scored(0, 0, 1.0)
    return replace(found, notes={"judge": [text]})
