"""The files for Docker, Kubernetes and SLURM say what their readers take."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"

# The part of the schema of kubeflow.org/v2beta1 MPIJob that does not describe pods, as the MPI Operator's
# custom resource definition has it (manifests/base/kubeflow.org_mpijobs.yaml of kubeflow/mpi-operator at
# 013fa15).  Unknown fields are refused here, where Kubernetes would drop them.
REPLICAS = {
    "type": "object",
    "properties": {
        "replicas": {"type": "integer"},
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {"type": "object"},
    },
    "additionalProperties": False,
}
RUN_POLICY = {
    "type": "object",
    "properties": {
        "activeDeadlineSeconds": {"type": "integer"},
        "backoffLimit": {"type": "integer"},
        "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
        "schedulingPolicy": {"type": "object"},
        "suspend": {"type": "boolean"},
        "ttlSecondsAfterFinished": {"type": "integer"},
    },
    "additionalProperties": False,
}
MPI_JOB = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v2beta1"},
        "kind": {"const": "MPIJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "properties": {
                "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
                "mpiReplicaSpecs": {
                    "type": "object",
                    "properties": {"Launcher": REPLICAS, "Worker": REPLICAS},
                    "required": ["Launcher"],
                    "additionalProperties": False,
                },
                "runPolicy": RUN_POLICY,
                "slotsPerWorker": {"type": "integer"},
                "sshAuthMountPath": {"type": "string"},
            },
            "required": ["mpiReplicaSpecs"],
            "additionalProperties": False,
        },
    },
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
}


@pytest.fixture
def job():
    return yaml.safe_load((DOCKER / "mpijob.yaml").read_text())


def pods(job):
    """The pods that the operator would make."""
    for name, replicas in job["spec"]["mpiReplicaSpecs"].items():
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name.lower()},
            "spec": replicas["template"]["spec"],
        }


def validate(job):
    jsonschema.validate(job, MPI_JOB)
    for pod in pods(job):
        kubernetes_validate.validate(pod, "1.30", strict=True)


def test_the_mpijob_is_valid(job):
    validate(job)


@pytest.mark.parametrize(
    "damage",
    [
        lambda job: job.update(apiVersion="kubeflow.org/v1"),
        lambda job: job["spec"].update(slotsPerWorker="2"),
        lambda job: job["spec"].update(cleanPodPolicy="Running"),  # where v1 had it
        lambda job: job["spec"]["runPolicy"].update(cleanPodPolicy="Sometimes"),
        lambda job: job["spec"]["mpiReplicaSpecs"].update(Master={}),
        lambda job: job["spec"]["mpiReplicaSpecs"]["Worker"].update(replica=4),
        lambda job: next(pods(job))["spec"]["containers"][0].update(arguments=[]),
        lambda job: next(pods(job))["spec"]["containers"][0].pop("name"),
    ],
)
def test_the_check_of_the_mpijob_can_fail(job, damage):
    damage(job)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(job)


def test_the_mpijob_fits_the_image(job):
    spec = job["spec"]
    dockerfile = (DOCKER / "Dockerfile").read_text()
    user = int(re.search(r"--uid (\d+)", dockerfile)[1])
    assert spec["sshAuthMountPath"] == "/home/hvd/.ssh"
    for pod in pods(job):
        assert pod["spec"]["securityContext"]["runAsUser"] == user
    launcher, worker = (pod["spec"]["containers"][0] for pod in pods(job))
    ranks = spec["mpiReplicaSpecs"]["Worker"]["replicas"] * spec["slotsPerWorker"]
    assert launcher["args"][launcher["args"].index("-np") + 1] == str(ranks)
    script = next(word for word in launcher["args"] if word.endswith(".py"))
    assert (ROOT / script.removeprefix("/opt/hvd/")).exists()
    assert f"Port {worker['ports'][0]['containerPort']}\n" in (DOCKER / "sshd_config").read_text()


def test_compose():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    launcher, worker = compose["services"]["launcher"], compose["services"]["worker"]
    assert launcher["depends_on"] == {"worker": {"condition": "service_healthy"}}
    assert launcher["environment"]["HVD_WORKERS"] in compose["services"]
    assert launcher["image"] == worker["image"]
    assert launcher["networks"] == worker["networks"] == list(compose["networks"])
    assert {volume.partition(":")[0] for volume in worker["volumes"]} == set(compose["volumes"])
    build = worker["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
    if shutil.which("docker-compose"):  # knows the published schema, and needs no engine for this
        subprocess.run(
            ["docker-compose", "-f", DOCKER / "compose.yaml", "config", "--quiet"], check=True, timeout=60
        )


def test_both_images_have_one_layout():
    """The image for GPUs differs in its base, its packages of CUDA and its build settings only."""

    def steps(name):
        text = (DOCKER / name).read_text().replace("\\\n", " ")
        return [line for line in text.splitlines() if line and not line.startswith(("#", "ARG", "ENV"))]

    cpu, cuda = steps("Dockerfile"), steps("Dockerfile.cuda")
    assert len(cpu) == len(cuda)
    different = [(a, b) for a, b in zip(cpu, cuda, strict=True) if a != b]
    assert all(a.startswith("FROM") or "nccl" in b or "userdel" in b for a, b in different)
    assert len(different) == 5
    for name in ("Dockerfile", "Dockerfile.cuda"):
        sources = re.findall(r"^COPY (?!--from)((?:\S+ )+)\S+$", (DOCKER / name).read_text(), re.MULTILINE)
        assert all((ROOT / path).exists() for line in sources for path in line.split())


@pytest.mark.parametrize("script", sorted(DOCKER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script):
    assert os.access(script, os.X_OK)
    shell = script.read_text().splitlines()[0].removeprefix("#!")
    subprocess.run([*shell.split(), "-n", script], check=True, timeout=20)


def test_the_slurm_script_wants_a_command():
    answer = subprocess.run([DOCKER / "slurm.sh"], capture_output=True, text=True, timeout=20)
    assert answer.returncode == 2 and "sbatch" in answer.stderr


def test_hosts_that_never_come_are_named(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# workers\nno-such-host.invalid slots=1\n")
    answer = subprocess.run(
        [DOCKER / "await-hosts.sh", hostfile, "true"],
        env={**os.environ, "HVD_PATIENCE": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 1 and "no-such-host.invalid cannot be logged into" in answer.stderr
