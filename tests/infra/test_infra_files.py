"""What is deployed is what the code has: image, RayJob, scrape file, dashboard and page name only what exists."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from harvest.config import load_job
from harvest.runtime.metrics import METRICS

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RAY = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)[1]  # type: ignore[index]
CONFIG_MAP, RAYJOB = yaml.safe_load_all((INFRA / "rayjob.yaml").read_text())
CLUSTER = RAYJOB["spec"]["rayClusterSpec"]
PODS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
DASHBOARD = json.loads((INFRA / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
PAGE = (INFRA / "README.md").read_text(encoding="utf-8")
SLURM = (INFRA / "slurm.sh").read_text()


# ---- the image --------------------------------------------------------------------------------------------------


def instructions(name: str) -> list[str]:
    """The Dockerfile's instructions of a kind, their lines joined."""
    text = "\n".join(line for line in (INFRA / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    return re.findall(rf"^{name} (.*)$", text.replace("\\\n", " "), flags=re.MULTILINE)


def test_the_image_installs_the_project_with_its_pins_and_all_its_extras_but_docs_and_tests() -> None:
    (install,) = [run for run in instructions("RUN") if "pip install" in run]
    extras = re.search(r"'\.\[([a-z0-9,]+)\]'", install)[1].split(",")  # type: ignore[index]
    assert set(extras) == set(PROJECT["optional-dependencies"]) - {"docs", "test"}
    assert "--constraint constraints.txt" in install
    assert install.count("pip install") == 1


def test_the_image_copies_what_an_install_reads_and_its_ignore_file_lets_that_through() -> None:
    copied = {word for line in instructions("COPY") for word in line.split()[:-1]}
    assert copied == {"pyproject.toml", "constraints.txt", PROJECT["readme"], *PROJECT["license-files"], "harvest"}
    assert all((ROOT / name).exists() for name in copied)
    ignored = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied


def test_the_image_is_of_cuda_with_a_python_that_is_new_enough_and_without_root() -> None:
    (base,) = instructions("FROM")
    assert base.startswith("nvidia/cuda:")
    python = {"ubuntu24.04": (3, 12)}[base.rpartition("-")[2]]
    assert python >= tuple(int(part) for part in PROJECT["requires-python"].removeprefix(">=").split("."))
    *_, user = instructions("USER")
    assert user not in ("root", "0")


# ---- Kubernetes -------------------------------------------------------------------------------------------------


def test_the_rayjob_runs_a_valid_job_with_one_worker_for_every_gpu() -> None:
    job = load_job(tomllib.loads(CONFIG_MAP["data"]["job.toml"]))
    assert job.run.path.startswith("/data/")
    command = RAYJOB["spec"]["entrypoint"].split()
    assert command[:2] == ["harvest", "run"]
    mounts = {mount["name"]: mount["mountPath"] for mount in containers()[0]["volumeMounts"]}
    assert command[2] == f"{mounts['job']}/job.toml"
    assert CONFIG_MAP["metadata"]["name"] == volumes(PODS[0])["job"]["configMap"]["name"]
    gpus = sum(pod.get("replicas", 1) * pod_of(pod)["resources"]["limits"].get("nvidia.com/gpu", 0) for pod in PODS)
    assert (job.model.device, CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"]) == ("cuda", "0")
    assert f"run.workers={gpus}" in command


def pod_of(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def containers() -> list[dict[str, Any]]:
    return [pod_of(group) for group in PODS]


def volumes(group: dict[str, Any]) -> dict[str, Any]:
    return {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}


def test_the_rayjob_keeps_authentication_on_resumes_after_a_lost_head_and_goes_when_it_is_done() -> None:
    spec = RAYJOB["spec"]
    assert CLUSTER["authOptions"] == {"mode": "token", "secretName": "harvest-ray-token"}
    assert "kubectl create secret generic harvest-ray-token --from-literal=auth_token=" in PAGE
    assert spec["backoffLimit"] >= 1
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] > 0
    assert int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 30


def test_the_pods_have_the_image_of_this_version_its_ray_and_its_user() -> None:
    assert CLUSTER["rayVersion"] == RAY
    for group in PODS:
        assert pod_of(group)["image"] == f"harvest:{PROJECT['version']}"
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


def test_a_pod_that_is_taken_away_leaves_the_cluster_in_order_and_has_the_time_to() -> None:
    for group in PODS:
        leave = pod_of(group)["lifecycle"]["preStop"]["exec"]["command"][-1]
        grace = int(re.search(r"ray stop --grace-period (\d+)", leave)[1])  # type: ignore[index]
        assert grace < group["template"]["spec"]["terminationGracePeriodSeconds"]


def test_every_mount_has_its_volume() -> None:
    for group in PODS:
        assert {mount["name"] for mount in pod_of(group)["volumeMounts"]} <= set(volumes(group))


# ---- Prometheus and Grafana -------------------------------------------------------------------------------------


def test_prometheus_finds_the_nodes_with_a_token_that_is_not_in_the_file() -> None:
    (scrape,) = yaml.safe_load((INFRA / "prometheus.yml").read_text())["scrape_configs"]
    (discovery,) = scrape["http_sd_configs"]
    assert discovery["url"] == "http://127.0.0.1:8265/api/prometheus/sd"
    assert discovery["authorization"] == {"type": "Bearer", "credentials_file": "/etc/prometheus/ray_auth_token"}
    assert discovery["authorization"]["credentials_file"] in PAGE


SERIES = re.compile(r"\bray_(harvest_[a-z_]+?)(_bucket|_sum|_count)?\{")


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_a_metric_that_exists_for_the_chosen_run(query: str) -> None:
    found = list(SERIES.finditer(query))
    assert found
    assert len(found) == query.count("ray_"), "a series without a choice of runs"
    assert query.count('{run=~"$run"}') == len(found)
    for match in found:
        kind = METRICS[match[1]].kind
        assert (kind == "histogram") == (match[2] is not None)


@pytest.mark.parametrize("query", QUERIES)
def test_counters_are_rates_or_the_highest_of_each_process_and_gauges_are_neither(query: str) -> None:
    """A process begins at zero in a series of its own; a plain counter, or a sum of them, would jump back."""
    for match in SERIES.finditer(query):
        around = re.search(r"(\w+)\($", query[: match.start()])
        function = around[1] if around else ""
        if METRICS[match[1]].kind == "gauge":
            assert function in ("", "last_over_time")
            assert re.search(r"max by \([a-z, ]+\) \((last_over_time\()?$", query[: match.start()]), "dead ones add up"
        else:
            window = {"rate": "[$__rate_interval]", "max_over_time": "[$__range]"}[function]
            assert query[match.start() :].partition("}")[2].startswith(window)
            assert "sum" in query[: match.start()]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_groups_by_labels_that_its_metric_has(query: str) -> None:
    labels = {"run", "worker"}
    for match in SERIES.finditer(query):
        labels |= set(METRICS[match[1]].labels) | ({"le"} if match[2] == "_bucket" else set())
    for group in re.findall(r"by \(([^)]*)\)", query):
        assert set(group.replace(" ", "").split(",")) <= labels


def test_a_legend_names_labels_that_its_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_every_metric_is_shown() -> None:
    assert {match[1] for query in QUERIES for match in SERIES.finditer(query)} == set(METRICS)


def test_panels_have_ids_and_places_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


# ---- Slurm, and the page ----------------------------------------------------------------------------------------


def test_the_slurm_script_is_bash_that_parses() -> None:
    subprocess.run(["bash", "-n", str(INFRA / "slurm.sh")], check=True)
    assert stat.S_IMODE((INFRA / "slurm.sh").stat().st_mode) & stat.S_IXUSR


@pytest.mark.parametrize("line", ["--requeue", "--open-mode=append", "--signal=B:USR1@180", "--exclusive"])
def test_the_slurm_script_asks_for_what_it_relies_on(line: str) -> None:
    assert f"#SBATCH {line}\n" in SLURM


def test_the_page_lists_the_ports_of_the_slurm_script() -> None:
    first = int(re.search(r"HARVEST_PORT:-(\d+)", SLURM)[1])  # type: ignore[index]
    offsets = {option: int(more) for option, more in re.findall(r"--([a-z-]+)=\$\(\(port \+ (\d+)\)\)", SLURM)}
    assert len(set(offsets.values())) == len(offsets) == 8
    rows = [[cell.strip() for cell in line.split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    listed = {row[3].partition(",")[0] for row in rows if len(row) == 6}
    assert {str(first), *(str(first + more) for more in offsets.values())} <= listed
    workers = re.search(r"--min-worker-port=(\d+) --max-worker-port=(\d+)", SLURM)
    assert workers is not None
    assert f"{workers[1]} to {workers[2]}" in listed


def test_the_page_names_only_files_and_variables_that_exist() -> None:
    for name in set(re.findall(r"(?:infra|jobs|harvest)/[\w./]+\w", PAGE)):
        assert (ROOT / name).exists(), name
    for variable in set(re.findall(r"HARVEST_\w+", PAGE)):
        assert variable in SLURM
