"""Names, units and what is served of them."""

import json
import re
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swathe import metrics
from swathe.errors import ConfigError
from swathe.metrics import Sheet
from swathe.web import Address, Answer, WebServer


def test_names_follow_the_conventions():
    units = ("_seconds", "_bytes", "_ratio", "_watts", "_celsius", "_hertz", "_info", "_per_second")
    plain = {"throttled", "worker_up", "worker_ready", "workers", "queue_ranges", "run_samples"}
    plain |= {"run_ranges", "run_tokens", "run_complete", "run_paused", "redis_up"}
    plain |= {"redis_durable", "redis_may_evict", "gpu_throttled", "paused_for_space"}
    names = [metric.name for metric in metrics.all_metrics()]
    assert len(set(names)) == len(names) > 50
    for metric in metrics.all_metrics():
        assert re.fullmatch(r"swathe_[a-z_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        short = metric.name.removeprefix("swathe_")
        assert metric.kind == "counter" or metric.name.endswith(units) or short in plain, short
        assert metric.help.endswith(".")
        assert not set(metric.labels) & {"range", "job", "worker", "pid"}


def test_what_cannot_be_read_is_absent_and_what_never_happened_is_0():
    sheet = Sheet()
    sheet.add(metrics.GPU_BUSY, None, "gpu")
    sheet.add_each(metrics.STATE_SECONDS, {"input": 2.5}, ("compute", "input"), "gpu")
    found = parse(sheet.render())
    assert found == {
        ("swathe_state_seconds_total", "gpu", "compute"): 0,
        ("swathe_state_seconds_total", "gpu", "input"): 2.5,
    }


def test_histograms_are_cumulative():
    sheet = Sheet()
    counts = (1, 0, 2, *(0,) * 7, 1)
    sheet.add_histogram(metrics.STAGE_DURATION, counts, 7.5, "gpu", "read")
    found = parse(sheet.render())
    name = "swathe_stage_duration_seconds"
    assert found[f"{name}_bucket", "gpu", "0.01", "read"] == 1
    assert found[f"{name}_bucket", "gpu", "0.1", "read"] == 3
    assert found[f"{name}_bucket", "gpu", "300.0", "read"] == 3
    assert found[f"{name}_bucket", "gpu", "+Inf", "read"] == found[f"{name}_count", "gpu", "read"]
    assert found[f"{name}_count", "gpu", "read"] == 4
    assert found[f"{name}_sum", "gpu", "read"] == 7.5


def parse(text: bytes) -> dict[tuple[str, ...], float]:
    """Values by name and labels (in the order of their names), as a Prometheus client reads them."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def get(address: Address, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_routes_answer_and_one_that_fails_does_not_end_the_server():
    def broken() -> Answer:
        raise ValueError

    routes = {"/good": lambda: Answer.json({"a": 1}), "/broken": broken}
    server = WebServer(Address("127.0.0.1", 0), routes)
    try:
        assert get(server.address, "/broken")[0] == 500
        status, body = get(server.address, "/good?x=1")
        assert (status, json.loads(body)) == (200, {"a": 1})
        status, body = get(server.address, "/other")
        assert (status, body) == (404, b"/broken\n/good\n")
        with pytest.raises(OSError, match="in use"):
            WebServer(server.address, routes)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9410", Address("127.0.0.1", 9410)),
        ("[::1]:0", Address("::1", 0)),
        ("off", None),
    ],
)
def test_addresses(text, address):
    assert Address.parse(text, name="X") == address
    assert address is None or str(address) == text


@pytest.mark.parametrize("text", ["", "9410", ":9410", "host", "host:", "host:70000", "a:b"])
def test_an_address_that_is_none_is_refused_by_its_name(text):
    with pytest.raises(ConfigError, match="SWATHE_X"):
        Address.parse(text, name="SWATHE_X")


def test_an_address_for_every_interface_is_reached_by_the_machines_name():
    everywhere = Address("0.0.0.0", 9410)  # noqa: S104 - not bound
    assert everywhere.reachable == f"{socket.gethostname()}:9410"
    assert Address("127.0.0.1", 9410).reachable == "127.0.0.1:9410"
