"""How the queue's Lua scripts run, and what they share. Redis runs each as one transaction.

The scripts stand in ``lua_leases.py`` and ``lua_ranges.py``, each with its ARGV and its answer. KEYS are the same for all, in the order of ``QueueKeys.for_script``:

    1 waiting   2 intermediate   3 running (rq's wip)   4 failed   5 leases   6 parked
    7 strays    8 clock          9 requeued counters   10 paused runs   11 our queues   12 rq's queues
    13 cancelled runs

Keys of single jobs, executions and workers are derived from ids inside the scripts, so a Redis Cluster cannot serve
them; one server carries the fleet easily (about four commands a range). They need Redis 7 or any Valkey.

Times are ``TIME`` of the server, never a client's: a worker whose clock is a minute off holds its leases like any other.
Members of rq's wip registry carry the score +inf: rq's own clean-up, which anyone's ``rq info`` starts and which imports
callbacks by name and fails jobs, then never finds an expired one. The true expiry stands in our sorted set.
"""

from typing import Any, Final

from redis import Redis
from rq.defaults import RQ_KEY_PREFIX

from swathe.queue.keys import QueueKeys

ALLOWED_FIELDS: Final = (
    "created_at", "data", "origin", "description", "enqueued_at", "started_at", "ended_at", "last_heartbeat",
    "worker_name", "timeout", "result_ttl", "failure_ttl", "ttl", "status", "exc_info", "enqueue_at_front",
    "retries_left", "number_of_retries", "enqueue_at_front_on_retry",
    "swathe_failures", "swathe_deaths", "swathe_bystander_deaths", "swathe_history", "swathe_refused_data",
)  # fmt: skip
"""Fields a job's hash may hold with a value. Callbacks, webhooks, dependencies, groups, repeats are not among them."""

REFUSED_DATA: Final = '["swathe.refused", null, [], {}]'
"""Stands in for a refused job's body, so that no dashboard unpickles what we refused."""

REFUSED_TTL_S: Final = 30 * 24 * 3600

_PRELUDE: Final = """
local P = '@PREFIX@'
local WAITING, INTERMEDIATE, RUNNING, FAILED, LEASES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local PARKED, STRAYS, CLOCK, REQUEUED = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local PAUSED, QUEUES, RQ_QUEUES, CANCELLED = KEYS[10], KEYS[11], KEYS[12], KEYS[13]

local function job_key(id) return P .. ':job:' .. id end
local function execution_key(id, ex) return P .. ':execution:' .. id .. ':' .. ex end
local function worker_executions(worker) return P .. ':worker:' .. worker .. ':executions' end
local function run_of(id) return string.match(id, '^(.+)%-%d+$') end
local function split(composite) return string.match(composite, '^(.*):([^:]*)$') end

local function server_time()
  local t = redis.call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1e6
end

-- Every renewal and every reaping leaves a trace. Too long without one means that Redis was down or nobody could
-- reach it: then the holders of leases could not renew them, and nothing may be taken away for one lease.
local function tick(now, lease, gap)
  local c = redis.call('HMGET', CLOCK, 'seen', 'hold')
  local seen, hold = tonumber(c[1]), tonumber(c[2]) or 0
  if not seen or now - seen > gap or seen - now > gap then
    hold = now + lease
    redis.call('HSET', CLOCK, 'hold', string.format('%.3f', hold))
    if seen and seen > now then  -- the server's clock went back: no lease may outlast its length
      for _, composite in ipairs(redis.call('ZRANGEBYSCORE', LEASES, now + lease, '+inf')) do
        redis.call('ZADD', LEASES, now + lease, composite)
      end
    end
  end
  if not seen or math.abs(now - seen) > gap / 4 then
    redis.call('HSET', CLOCK, 'seen', string.format('%.3f', now))
  end
  return hold
end

-- An execution that exists is held; its age does not matter.
local function owned(id, ex)
  return redis.call('EXISTS', execution_key(id, ex)) == 1 and redis.call('ZSCORE', RUNNING, id .. ':' .. ex)
end

local function release(id, ex, worker)
  local composite = id .. ':' .. ex
  redis.call('ZREM', RUNNING, composite)
  redis.call('ZREM', LEASES, composite)
  redis.call('DEL', execution_key(id, ex), P .. ':executions:' .. id)
  if worker and worker ~= '' then redis.call('SREM', worker_executions(worker), composite) end
end

local function remember(id, field, line)
  if field ~= '' then redis.call('HINCRBY', job_key(id), field, 1) end
  if line ~= '' then
    local old = redis.call('HGET', job_key(id), 'swathe_history') or ''
    if #old > 4000 then old = string.sub(old, -4000) end
    redis.call('HSET', job_key(id), 'swathe_history', old .. line .. '\\n')
  end
end

-- False when the job's hash is gone: the id alone says nothing, and a rebuild from the store will find the range.
local function push_back(id, front)
  if redis.call('EXISTS', job_key(id)) == 0 then return false end
  redis.call('HSET', job_key(id), 'status', 'queued', 'worker_name', '')
  redis.call('HDEL', job_key(id), 'started_at')
  redis.call(front and 'LPUSH' or 'RPUSH', WAITING, id)
  return true
end

local function set_aside(id, reason, now_iso)
  local key = job_key(id)
  local allowed = {@ALLOWED@}
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if not allowed[field] then redis.call('HDEL', key, field) end
  end
  local data = redis.call('HGET', key, 'data') or ''
  redis.call('HSET', key, 'status', 'failed', 'exc_info', reason, 'ended_at', now_iso, 'data', '@REFUSED@',
             'swathe_refused_data', string.sub(data, 1, 4096))
  redis.call('EXPIRE', key, @REFUSED_TTL@)
  redis.call('ZADD', FAILED, server_time() + @REFUSED_TTL@, id)
end
"""


def _complete(body: str, *, when_full: bool) -> str:
    allowed = ", ".join(f"['{field}']=true" for field in ALLOWED_FIELDS)
    # A flagged script runs whole or not at all: a full server or one that cannot write its file refuses it before
    # its first command, never in the middle. What only moves or frees entries also runs when the server is full.
    flags = "#!lua flags=allow-oom" if when_full else "#!lua"
    text = flags + "\n" + _PRELUDE + body
    for mark, value in (
        ("@PREFIX@", RQ_KEY_PREFIX),
        ("@ALLOWED@", allowed),
        ("@REFUSED_TTL@", str(REFUSED_TTL_S)),
        ("@REFUSED@", REFUSED_DATA),
    ):
        text = text.replace(mark, value)
    return text


class Scripts:
    """The scripts bound to one client and one queue's keys."""

    def __init__(self, connection: Redis, keys: QueueKeys) -> None:
        self._keys = keys.for_script()
        self._connection = connection
        self._bound: dict[str, Any] = {}

    def __call__(self, body: str, *args: str | float | bytes, when_full: bool = True) -> Any:
        """Run a script; loads it again where the server forgot it (a restart does that)."""
        script = self._bound.get(body)
        if script is None:
            script = self._bound[body] = self._connection.register_script(
                _complete(body, when_full=when_full)
            )
        return script(keys=self._keys, args=args)
