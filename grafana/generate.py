"""Writes the dashboards: python -m grafana.generate. The JSON is committed; a test says when it is not this code's."""

import json
from pathlib import Path
from typing import Final

from grafana.panels import (
    ALL_IS_GOOD,
    ANY_IS_BAD,
    HIGH_IS_GOOD,
    Json,
    Panel,
    Query,
    dashboard,
    panel,
    variable,
)

FOLDER: Final = Path(__file__).parent / "dashboards"
_D: Final = 'node=~"$node",device=~"$device"'
_N: Final = 'node=~"$node"'
_R: Final = 'run=~"$run"'
_DEVICE: Final = "{{node}} {{device}}"

RUN: Final = variable("run", "label_values(swathe_run_info, run)", "Run")
NODE: Final = variable("node", "label_values(swathe_device_info, node)", "Node")
DEVICE: Final = variable(
    "device", 'label_values(swathe_device_info{node=~"$node"}, device)', "Device"
)


def rate(metric: str, selector: str = _D, by: str = "node, device", more: str = "") -> str:
    """Per second over the interval that Grafana finds right, summed."""
    return f"sum by ({by}) (rate({metric}{{{selector}{more}}}[$__rate_interval]))"


def total(metric: str, selector: str = _D) -> str:
    """Per second, over everything chosen."""
    return f"sum(rate({metric}{{{selector}}}[$__rate_interval]))"


def by_device(expr: str) -> list[Query]:
    """One query with a series for each device."""
    return [Query(expr=expr, legend=_DEVICE)]


def stat(title: str, expr: str, unit: str, help_: str, **options: object) -> Panel:
    """A large number."""
    return panel(
        title, expr, unit, help_, **{"kind": "stat", "width": 3, "text": "value", **options}
    )


def _fleet_now() -> list[Panel]:
    return [
        stat("Samples/s", total("swathe_samples_total"), "short", "Samples stored each second."),
        stat("Tokens/s", total("swathe_tokens_total"), "short", "Tokens stored each second."),
        panel(
            "Limited by",
            [Query(expr="swathe:fleet_limiting:ratio1m", legend="{{limit}}")],
            "percentunit",
            "What the devices spent most of the last minute on or waiting for. compute is what you want to see.",
            kind="stat", width=6,
        ),
        stat("Workers", "sum(swathe_workers)", "short", "Live workers.", steps=ALL_IS_GOOD),
        stat("Queued", 'sum(swathe_queue_ranges{state="queued"})', "short", "Ranges that wait for a worker."),
        stat("Time left", f"max(swathe_run_eta_seconds{{{_R}}} or swathe_run_complete{{{_R}}} * 0)", "s",
             "At the pace of the last ten minutes.", steps=((None, "green"), (604_800, "orange"))),
        stat("Set aside", f'sum(swathe_run_ranges{{{_R},state="set_aside"}})', "short",
             "Ranges given up after repeated failures: swathe retry brings them back.", steps=ANY_IS_BAD),
    ]  # fmt: skip


def _fleet_progress() -> list[Panel]:
    return [
        panel(
            "Rows by state",
            [Query(expr=f"sum by (run, state) (swathe_run_samples{{{_R}}})", legend="{{run}} {{state}}")],
            "short", "stored + rejected + quarantined + remaining = rows of the data set.", kind="bargauge",
        ),
        panel(
            "Stored",
            [Query(
                expr=f'swathe_run_samples{{{_R},state="stored"}}'
                f" / ignoring (state) group_left () sum without (state) (swathe_run_samples{{{_R}}})",
                legend="{{run}}",
            )],
            "percentunit", "Share of the data set's rows.", maximum=1,
        ),
        panel(
            "Ranges in Redis",
            [Query(expr="sum by (state) (swathe_queue_ranges)", legend="{{state}}")],
            "short", "Over all models.", stacked=True,
        ),
    ]  # fmt: skip


def _fleet_limits() -> list[Panel]:
    return [
        panel(
            "What the devices wait for",
            [Query(expr=f"avg by (limit) (swathe:limit_share:ratio1m{{{_D}}})", legend="{{limit}}")],
            "percentunit", "Shares of the clock, mean of the chosen devices. They add up to 100 %.",
            width=12, stacked=True, maximum=1,
        ),
        panel(
            "Limit of each device",
            [Query(expr=f"swathe:limiting:ratio1m{{{_D}}}", legend="{{node}} {{device}}: {{limit}}")],
            "percentunit", "The largest share of each device's clock.", kind="bargauge", width=12, maximum=1,
        ),
    ]  # fmt: skip


def _fleet_speed() -> list[Panel]:
    return [
        panel("Samples/s by device", by_device(rate("swathe_samples_total")), "short",
              "Stored.", stacked=True),
        panel("Tokens/s by device", by_device(rate("swathe_tokens_total")), "short",
              "Stored.", stacked=True),
        panel("Workers by state", [Query(expr="sum by (state) (swathe_workers)", legend="{{state}}")],
              "short", "What each worker does or waits for at this moment.", stacked=True),
    ]  # fmt: skip


def fleet() -> Json:
    """Is it moving, when will it be done, and what holds it up."""
    rows = {
        "Now": _fleet_now(),
        "Progress": _fleet_progress(),
        "What limits": _fleet_limits(),
        "Speed": _fleet_speed(),
    }
    return dashboard("swathe-fleet", "Fleet", rows, [RUN, NODE, DEVICE])


def _gpu_use() -> list[Panel]:
    return [
        panel("Utilization (driver)", by_device(f"swathe_gpu_utilization_ratio{{{_D}}}"), "percentunit",
              "Share of time with any kernel running. Small kernels one after another show 100 %, too.",
              maximum=1, steps=HIGH_IS_GOOD),
        panel("Busy share (model)", by_device(f"swathe_gpu_busy_ratio{{{_D}}}"), "percentunit",
              "Share of the last minute in which the model computed.", maximum=1, steps=HIGH_IS_GOOD),
        panel("Model FLOP utilization", by_device(f"swathe_model_flops_utilization_ratio{{{_D}}}"),
              "percentunit", "Useful operations over the matrix rate measured on this very device.",
              maximum=1, steps=HIGH_IS_GOOD),
    ]  # fmt: skip


def _gpu_speed() -> list[Panel]:
    return [
        panel("Tokens/s", by_device(rate("swathe_tokens_total")), "short", "Stored."),
        panel("Tokens for each second of computing", by_device(f"swathe:device_speed:tokens_per_second10m{{{_D}}}"),
              "short", "A device's own speed, however well it is fed; compare devices of one kind."),
        panel("Tokens computed but not wanted",
              by_device(f"{rate('swathe_padding_tokens_total')} / ({rate('swathe_tokens_total')} > 0)"),
              "percentunit", "Padding over stored tokens."),
    ]  # fmt: skip


def _gpu_card() -> list[Panel]:
    return [
        panel("Memory", by_device(f"swathe_gpu_memory_used_bytes{{{_D}}} / swathe_gpu_memory_total_bytes{{{_D}}}"),
              "percentunit", "Used share; full memory is no sign of work.", maximum=1),
        panel("Power", [Query(expr=f"swathe_gpu_power_watts{{{_D}}}", legend=_DEVICE),
                        Query(expr=f"swathe_gpu_power_limit_watts{{{_D}}}", legend=f"{_DEVICE} limit")],
              "watt", "A busy card draws close to its limit."),
        panel("Temperature", by_device(f"swathe_gpu_temperature_celsius{{{_D}}}"), "celsius", "Of the chip."),
        panel("SM clock", by_device(f"swathe_gpu_sm_clock_hertz{{{_D}}}"), "hertz", "Falls when held down."),
        panel("Held down", [Query(expr=f"sum by (node, device, reason) (swathe_gpu_throttled{{{_D}}})",
                                  legend=f"{_DEVICE} {{{{reason}}}}")],
              "short", "1 while clocks are held down for this reason."),
        panel("Hardware errors",
              [Query(expr=f"sum by (node, device, kind) (swathe_gpu_ecc_errors_total{{{_D}}})",
                     legend=f"{_DEVICE} ECC {{{{kind}}}}"),
               Query(expr=f"sum by (node, device) (swathe_gpu_xid_errors_total{{{_D}}})", legend=f"{_DEVICE} Xid")],
              "short", "Since the driver or the supervisor started.", steps=ANY_IS_BAD),
    ]  # fmt: skip


def _gpu_dcgm() -> list[Panel]:
    return [
        panel("Tensor pipe active (dcgm-exporter)",
              [Query(expr='DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{UUID=~"$device"}', legend="{{Hostname}} {{UUID}}")],
              "percentunit", "With the optional service dcgm-exporter only.", width=12, maximum=1),
        panel("Device memory active (dcgm-exporter)",
              [Query(expr='DCGM_FI_PROF_DRAM_ACTIVE{UUID=~"$device"}', legend="{{Hostname}} {{UUID}}")],
              "percentunit", "With the optional service dcgm-exporter only.", width=12, maximum=1),
    ]  # fmt: skip


def gpu() -> Json:
    """Utilization beside busy share beside useful work: full memory and 100 % say little."""
    rows = {
        "Use": _gpu_use(),
        "Speed": _gpu_speed(),
        "Card": _gpu_card(),
        "Profiling counters": _gpu_dcgm(),
    }
    return dashboard("swathe-gpu", "GPU", rows, [NODE, DEVICE])


def _storage_now() -> list[Panel]:
    return [
        stat("Written/s", total("swathe_written_bytes_total"), "Bps", "Shards, all chosen devices.", width=4),
        stat("Backlog", f"sum(swathe_backlog_bytes{{{_D}}})", "bytes", "Computed and not yet stored.", width=4),
        stat("Waiting for the store", f'avg(swathe:state_share:ratio1m{{{_D},state="write"}})', "percentunit",
             "Share of the devices' clock.", width=4, steps=((None, "green"), (0.1, "orange"), (0.3, "red"))),
        stat("Free", f"min(swathe_run_store_free_bytes{{{_R}}})", "bytes", "Room in the chosen runs' stores.", width=4),
        stat("Still to come", f"sum(swathe_run_remaining_bytes{{{_R}}})", "bytes", "States not stored yet.", width=4),
        stat("Errors", f'sum(increase(swathe_ranges_total{{{_D},outcome="store_error"}}[10m]))', "short",
             "Ranges handed back in ten minutes because store or network failed.", width=4, steps=ANY_IS_BAD),
    ]  # fmt: skip


def _storage_flow() -> list[Panel]:
    return [
        panel("Written by device", by_device(rate("swathe_written_bytes_total")), "Bps", "Shards.", stacked=True),
        panel("Backlog by device", by_device(f"sum by (node, device) (swathe_backlog_bytes{{{_D}}})"), "bytes",
              "Grows to the host buffers' size where the store is the limit.", stacked=True),
        panel("Requests repeated", by_device(rate("swathe_store_retries_total")), "reqps",
              "S3 asks to slow down, or the network breaks."),
        panel("Held up by the store",
              [Query(expr=f"max by (node) (swathe_store_stalled_seconds{{{_D}}})", legend="{{node}} has not moved"),
               Query(expr=f"max by (node) (swathe_paused_for_space{{{_D}}})", legend="{{node}} paused for space")],
              "s", "Seconds since the store last moved while it was waited for; 1 while computed ranges wait for room."),
    ]  # fmt: skip


def _storage_stages() -> list[Panel]:
    return [
        panel("Seconds by stage",
              [Query(expr=rate("swathe_stage_seconds_total", by="stage"), legend="{{stage}}")],
              "short", "Seconds of work each second; stages run beside each other."),
        panel("A range in a stage, 95 of 100",
              [Query(expr=f"histogram_quantile(0.95, {rate('swathe_stage_duration_seconds_bucket', by='le, stage')})",
                     legend="{{stage}}")],
              "s", "95 of 100 ranges are through a stage in this time."),
        panel("Room and need",
              [Query(expr=f"swathe_run_store_free_bytes{{{_R}}}", legend="{{run}} free"),
               Query(expr=f"swathe_run_remaining_bytes{{{_R}}}", legend="{{run}} to come"),
               Query(expr=f"min by (node) (swathe_store_free_bytes{{{_D}}})", legend="{{node}} free")],
              "bytes", "A run whose need is above its room will pause."),
    ]  # fmt: skip


def storage() -> Json:
    """Does the store take what the devices make, and is there room."""
    rows = {"Now": _storage_now(), "Flow": _storage_flow(), "Stages": _storage_stages()}
    return dashboard("swathe-storage", "Storage", rows, [RUN, NODE, DEVICE])


def _reliability_now() -> list[Panel]:
    return [
        stat("Alerts", 'count(ALERTS{alertname=~"Swathe.*",alertstate="firing"}) or vector(0)', "short",
             "Firing now; the runbook has a page for each.", steps=ANY_IS_BAD),
        stat("Redis", "min(swathe_redis_up)", "short", "Whether it answers.", steps=ALL_IS_GOOD,
             mappings={"0": ("down", "red"), "1": ("up", "green")}),
        stat("Queue durable", "min(swathe_redis_durable)", "short", "Whether a restart keeps the queue.",
             steps=ALL_IS_GOOD, mappings={"0": ("no", "red"), "1": ("yes", "green")}),
        stat("Quarantined", f'sum(swathe_run_samples{{{_R},state="quarantined"}})', "short",
             "Samples that could not be computed.", steps=ANY_IS_BAD),
        stat("Suspect ranges", f'sum(swathe_run_ranges{{{_R},state="suspect"}})', "short",
             "Stored by a device whose canary failed.", steps=ANY_IS_BAD),
        stat("Canary error", f"max(swathe_canary_error_ratio{{{_D}}}) or vector(0)", "percentunit",
             "The worst device's last sample computed twice, over what is allowed.",
             steps=((None, "green"), (0.5, "orange"), (1, "red"))),
        stat("Last range", f"time() - max(swathe_last_range_completed_timestamp_seconds{{{_D}}})", "s",
             "Seconds since the last range was stored.", steps=((None, "green"), (120, "orange"), (600, "red"))),
        stat("Workers down", f"sum(1 - swathe_worker_up{{{_D}}})", "short",
             "Devices without a running worker.", steps=ANY_IS_BAD),
    ]  # fmt: skip


def _reliability_again() -> list[Panel]:
    return [
        panel("Re-queued ranges",
              [Query(expr="sum by (reason) (increase(swathe_requeued_ranges_total[$__rate_interval]))",
                     legend="{{reason}}")],
              "short", "death and lease: a worker died. infrastructure: the store failed. error: the range raised."),
        panel("Ends of ranges", [Query(expr=rate("swathe_ranges_total", by="outcome"), legend="{{outcome}}")],
              "short", "Each second, by outcome.", stacked=True),
        panel("Deaths and restarts",
              [Query(expr=f"sum by (node, device) (increase(swathe_worker_deaths_total{{{_D}}}[$__rate_interval]))",
                     legend=f"{_DEVICE} deaths"),
               Query(expr=f"sum by (node, device) (increase(swathe_worker_restarts_total{{{_D}}}[$__rate_interval]))",
                     legend=f"{_DEVICE} restarts")],
              "short", "Of worker processes.", steps=ANY_IS_BAD),
    ]  # fmt: skip


def _reliability_trust() -> list[Panel]:
    return [
        panel("Samples not right the first time",
              [Query(expr=f"sum by (node, device) (swathe_recomputed_samples_total{{{_D}}})",
                     legend=f"{_DEVICE} computed again"),
               Query(expr=f"sum by (node, device) (swathe_quarantined_samples_total{{{_D}}})",
                     legend=f"{_DEVICE} quarantined")],
              "short", "Not finite, or all zero."),
        panel("Canaries", [Query(expr=f"sum by (outcome) (swathe_canaries_total{{{_D}}})", legend="{{outcome}}")],
              "short", "Samples computed twice since the supervisors started."),
        panel("Out of device memory", by_device(f"sum by (node, device) (swathe_out_of_memory_total{{{_D}}})"),
              "short", "Batches that had to be cut."),
    ]  # fmt: skip


def _reliability_around() -> list[Panel]:
    return [
        panel("Redis memory",
              [Query(expr="swathe_redis_memory_used_bytes", legend="used"),
               Query(expr="swathe_redis_memory_max_bytes", legend="limit")],
              "bytes", "Ranges are small: growth without a submit is somebody else's."),
        panel("Readings that failed",
              [Query(expr="sum by (source) (swathe_exporter_errors_total)", legend="{{source}}"),
               Query(expr=f"sum by (node) (swathe_nvml_errors_total{{{_N}}})", legend="{{node}} NVML")],
              "short", "Exporter: Redis or a run's store. NVML: a driver that does not answer."),
        panel("Versions", [Query(expr="count by (job, node, version) (swathe_build_info)",
                                 legend="{{job}} {{node}} {{version}}")],
              "short", "Software of exporter and nodes.", kind="table"),
    ]  # fmt: skip


def reliability() -> Json:
    """What went wrong, what was done about it, and whether the results can be trusted."""
    rows = {
        "Now": _reliability_now(),
        "Again": _reliability_again(),
        "Trust": _reliability_trust(),
        "Around": _reliability_around(),
    }
    return dashboard("swathe-reliability", "Reliability", rows, [RUN, NODE, DEVICE])


def dashboards() -> dict[str, str]:
    """Every dashboard by file name, as it is committed."""
    found = {"fleet": fleet(), "gpu": gpu(), "storage": storage(), "reliability": reliability()}
    return {
        f"{name}.json": json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        for name, value in found.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in dashboards().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
