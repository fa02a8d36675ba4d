"""recipes/launch/, as far as it can be checked without SLURM and Kubernetes. tests/e2e/test_hosts.py runs slurm.sh."""

import subprocess
from pathlib import Path

import yaml

LAUNCH = Path(__file__).parents[2] / "recipes" / "launch"


def test_all_pods_have_the_same_image_and_shared_folder_and_a_token():
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    spec = job["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    containers = [pod["containers"][0] for pod in pods]
    assert job["kind"] == "RayJob" and spec["authOptions"] == {"mode": "token"} and len(pods) == 2
    assert len({container["image"] for container in containers}) == 1
    mounted = [{mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} for container in containers]
    assert mounted[0] == mounted[1] and f"run.dir={mounted[0]['shared']}/" in job["spec"]["entrypoint"]
    for pod in pods:
        assert {volume["name"] for volume in pod["volumes"]} == set(mounted[0])


def test_the_slurm_script_is_valid_bash():
    done = subprocess.run(["bash", "-n", str(LAUNCH / "slurm.sh")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
