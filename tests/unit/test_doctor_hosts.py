"""doctor --hosts: what is judged from what was found out, and the agent on this host."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hvd_adaptive.cli import doctor_hosts, host_agent
from hvd_adaptive.cli.doctor import doctor
from hvd_adaptive.cli.doctor_hosts import AgentError, Link, Survey
from hvd_adaptive.core.errors import ConfigurationError


def report(address, **changes):
    return {
        "python": "3.11.2",
        "versions": {"horovod": "0.28.1", "torch": "2.13.0", "numpy": "2.4.6", "hvd-adaptive": "0.1.0"},
        "built": {"torch": "2.13.0", "tensorflow": None},
        "hostname": f"host-{address[-1]}",
        "resolved": address,
        "interfaces": {
            "lo": {"address": "127.0.0.1", "mtu": 65536},
            "eth0": {"address": address, "mtu": 1500},
        },
        "routes": {f"10.0.0.{i}": address for i in range(1, 5)},
        "folder": True,
        "cores": 2,
        **changes,
    }


@pytest.fixture
def survey():
    names = ["a", "b", "c"]
    addresses = {name: f"10.0.0.{i}" for i, name in enumerate(names, 1)}
    return Survey(
        names,
        reports={name: report(addresses[name]) for name in names},
        addresses=addresses,
        clocks=dict.fromkeys(names, (0.01, 0.005)),
        links=[
            Link("a", "b", 1e-4, 1e9, True),
            Link("b", "c", 2e-4, 9e8, True),
            Link("c", "a", 3e-4, 8e8, True),
            Link("a", "c", 1e-4, None, True),
        ],
    )


def rows(survey):
    return {finding.name: finding for finding in doctor_hosts.judge(survey)}


def test_all_is_well(survey):
    found = rows(survey)
    assert {finding.state for finding in found.values()} == {"ok"}
    assert found["interface"].found.startswith("eth0")
    assert found["MTU"].found == "1500"
    assert found["latency"].found == "0.10 to 0.30 ms a round trip, c to a the slowest"
    assert found["bandwidth"].found == "800 Mbit/s (c to a) to 1 Gbit/s"
    assert "bandwidth=8e+08" in found["bandwidth"].remedy


@pytest.mark.parametrize(
    ("package", "title", "remedy"),
    [
        ("horovod", "Horovod", "on c: hvd-adaptive horovod install"),
        ("torch", "torch", "on c: pip install torch==2.13.0"),
        ("numpy", "NumPy", "on c: pip install numpy==2.4.6"),
        ("hvd-adaptive", "hvd-adaptive", "on c: pip install hvd-adaptive==0.1.0, or the same checkout"),
    ],
)
@pytest.mark.parametrize("other", ["9.9", None])
def test_another_version_on_one_host(survey, package, title, remedy, other):
    survey.reports["c"]["versions"][package] = other
    finding = rows(survey)[title]
    assert finding.state == "missing"
    assert finding.found.endswith(f"{other or 'not installed'}: c")
    assert finding.remedy == remedy


def test_the_python_of_most_is_the_one_to_have(survey):
    survey.reports["a"]["python"] = "3.12.1"
    assert rows(survey)["Python"].remedy == "on a: install 3.11.2"


def test_horovod_that_was_built_for_another_framework(survey):
    survey.reports["b"]["built"]["torch"] = "2.12.0"
    finding = rows(survey)["horovod.torch"]
    assert finding.found == "b: built with torch 2.12.0, 2.13.0 is installed"
    assert finding.remedy == "on b: hvd-adaptive horovod install --yes"


@pytest.mark.parametrize(("ahead", "state"), [(0.3, "ok"), (0.7, "note")])
def test_clocks(survey, ahead, state):
    survey.clocks["b"] = (ahead, 0.01)
    finding = rows(survey)["clocks"]
    assert finding.state == state
    assert (state == "ok") == (finding.remedy == "")


def test_clocks_that_a_slow_connection_cannot_tell_apart(survey):
    survey.clocks["b"] = (0.7, 0.4)
    assert rows(survey)["clocks"].state == "ok"


@pytest.mark.parametrize(
    ("resolved", "said"),
    [("127.0.1.1", "connections are refused"), (None, "does not resolve"), ("10.9.9.9", "none of its own")],
)
def test_a_hostname_that_gloo_cannot_use(survey, resolved, said):
    survey.reports["b"]["resolved"] = resolved
    finding = rows(survey)["hostnames"]
    assert finding.state == "missing" and said in finding.found
    assert finding.remedy == "on b, in /etc/hosts: 10.0.0.2 host-2"


def test_interfaces_of_different_names(survey):
    interfaces = survey.reports["b"]["interfaces"]
    interfaces["ens3"] = interfaces.pop("eth0")
    finding = rows(survey)["interface"]
    assert finding.state == "missing" and finding.found == "eth0: a, c\nens3: b"


def test_a_host_without_a_route(survey):
    survey.reports["b"]["routes"] = {}
    finding = rows(survey)["interface"]
    assert finding.state == "missing" and "no route: b" in finding.found and "ip route" in finding.remedy


def test_mtu(survey):
    survey.reports["b"]["interfaces"]["eth0"]["mtu"] = 9000
    survey.links[1] = Link("b", "c", 2e-4, None, False, "timed out")
    found = rows(survey)
    assert found["MTU"].found == "1500: a, c\n9000: b"
    assert found["MTU"].remedy == "on b: ip link set INTERFACE mtu 1500"
    assert found["packets"].state == "missing" and found["packets"].found.startswith("b to c")
    assert found["bandwidth"].state in ("ok", "missing")


def test_a_slow_link_and_a_closed_one(survey):
    survey.links[2] = Link("c", "a", 3e-4, 1e8, True)
    survey.links.append(Link("b", "a", None, error="timed out"))
    found = rows(survey)
    assert found["bandwidth"].state == "note" and "the others have 900 Mbit/s" in found["bandwidth"].remedy
    assert found["connections"].state == "missing"
    assert found["connections"].found == "b cannot connect to a: timed out"


def test_a_folder_that_one_host_lacks(survey):
    survey.reports["c"]["folder"] = False
    assert rows(survey)["folder"].state == "note" and rows(survey)["folder"].found.endswith("is not on c")


def test_hosts_that_do_not_answer(survey):
    survey.hosts.append("d")
    survey.faults["d"] = AgentError("ssh d: Permission denied (publickey).", "ssh-copy-id d")
    finding = rows(survey)["ssh"]
    assert (finding.state, finding.remedy) == ("missing", "ssh-copy-id d")


def test_names():
    assert doctor_hosts.parse_hosts("a, b:4,c") == ["a", "b", "c"]
    for text in ("a,,b", "", "a,b,a:2"):
        with pytest.raises(ConfigurationError, match="--hosts"):
            doctor_hosts.parse_hosts(text)


def test_the_agent_on_this_host():
    """Two names of this host need no ssh; everything else is as between hosts."""
    answer = CliRunner().invoke(
        doctor, ["--hosts", "localhost,127.0.0.1", "--seconds", "0.1", "--json"], catch_exceptions=False
    )
    told = json.loads(answer.stdout)
    found = {finding["name"]: finding for finding in told["findings"]}
    assert found["ssh"]["found"] == "2 hosts answer"
    assert found["folder"]["found"] == os.getcwd()
    assert {link["whole_packets"] for link in told["links"]} == {True}
    assert all(link["bandwidth"] > 1e6 and link["round_trip"] > 0 for link in told["links"])
    assert told["hosts"]["localhost"]["python"] == sys.version.split()[0]


def test_a_name_without_address_is_told_with_its_remedy():
    found = doctor_hosts.survey(["localhost", "no-such-host.invalid"])
    assert list(found.faults) == ["no-such-host.invalid"]
    assert list(found.reports) == ["localhost"]
    finding = doctor_hosts.judge(found)[0]
    assert finding.state == "missing" and "no-such-host.invalid" in finding.remedy


def test_the_agent_ends_with_its_connection():
    process = subprocess.Popen(
        [sys.executable, host_agent.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdin.write('{"ask": "listen"}\n')
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["port"] > 0
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_the_agent_says_what_went_wrong(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", ['{"ask": "ping", "address": "127.0.0.1", "port": 1}\n'])
    host_agent.main()
    assert "refused" in json.loads(capsys.readouterr().out)["error"]
