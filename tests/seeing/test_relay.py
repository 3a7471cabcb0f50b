"""A node that nobody can reach hands its metrics over, and goes on by itself after Redis was away."""

import json
import threading
import time

import pytest
from fleet import wait_for

from producer.exporter import Exporter
from producer.runs import Runs
from swathe import names
from swathe.queue import connect, relayed_nodes
from swathe.settings import RELAY, Settings
from swathe.web import Address, WebServer
from tests.seeing.test_metrics import get, parse
from worker.host.node import Node
from worker.telemetry.nvml import GpuMonitor, GpuReader
from worker.telemetry.relay import Relay
from worker.telemetry.reports import Inbox

NAME = "rack 3/é?"
"""A name that has to be quoted in a path."""


@pytest.fixture
def node():
    return Node(Inbox(), GpuMonitor(GpuReader([])))


def exporter_of(client):
    return Exporter(client, Runs(dict, Settings()))


def test_the_exporter_lists_and_serves_a_node_that_hands_its_metrics_over(redis, redis_url, node):
    exporter = exporter_of(redis)
    server = WebServer(
        Address("127.0.0.1", 0), {"/targets": exporter.targets}, {"/nodes/": exporter.node}
    )
    relay = Relay(connect(redis_url), NAME, lambda: node.metrics().body, every_s=0.05)
    try:
        wait_for(lambda: relayed_nodes(redis) == [NAME], what="the node in Redis")
        (listed,) = json.loads(get(server.address, "/targets")[1])
        assert listed["targets"] == [NAME]
        assert listed["labels"]["node"] == NAME
        assert listed["labels"]["__meta_swathe_relayed"] == "yes", "prometheus.yml looks for it"
        status, page = get(server.address, listed["labels"]["__metrics_path__"])
        assert status == 200
        assert ("swathe_nvml_errors_total",) in parse(page)
        assert get(server.address, "/nodes/other")[0] == 404
        assert get(server.address, f"{listed['labels']['__metrics_path__']}/deeper")[0] == 404
        assert 0 < redis.ttl(names.node_key(NAME)) <= 30, "a dead node must not stay on the list"
    finally:
        relay.close()
        server.close()


def test_the_relay_goes_on_after_redis_was_away(new_server, node):
    pages = []

    def render():
        pages.append(node.metrics().body)
        return pages[-1]

    relay = Relay(connect(new_server.url, retries=0), "n1", render, every_s=0.05)
    exporter = exporter_of(connect(new_server.url, retries=0))
    try:
        wait_for(lambda: exporter.node("n1").status == 200, what="the node")
        new_server.stop(kill=True)
        assert exporter.node("n1").status == 503
        assert exporter.targets().status == 503
        before = len(pages)
        wait_for(lambda: len(pages) >= before + 3, what="attempts while Redis is away")
        new_server.start()
        connect(new_server.url).flushall()
        wait_for(lambda: exporter.node("n1").status == 200, what="the node again")
    finally:
        relay.close()
    assert not any(thread.name == "relay" for thread in threading.enumerate())


def test_two_nodes_of_one_name_are_told(redis, redis_url, node):
    def new():
        return Relay(connect(redis_url), "n1", lambda: node.metrics().body, every_s=0.05)

    first = new()
    wait_for(lambda: relayed_nodes(redis) == ["n1"], what="the first node")
    first.close()
    relays = [new()]
    try:
        time.sleep(0.3)
        assert not relays[0]._said, "the one before it is gone: a restart is no second node"
        relays.append(new())
        wait_for(lambda: relays[0]._said and relays[1]._said, what="warnings")
    finally:
        for relay in relays:
            relay.close()


def test_a_relayed_node_tells_its_workers_no_address(node):
    settings = Settings(metrics_address="127.0.0.1:0", metrics_advertise=RELAY)
    assert node.serve(settings) is None
    node.close()


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("SWATHE_NODE", "")
    monkeypatch.setenv("REDIS_URL", "")
    assert Settings().node
    assert Settings().redis_url is None
