"""Lua of producers and operators: enqueue if absent, resume, cancel. KEYS: see ``scripts.py``."""

from typing import Final

ENQUEUE: Final = """
-- Put jobs into the queue unless they are in it; repair what is half there.
-- ARGV: 1 queue name  2 now (ISO)  3 'asked' by a person, or 'rebuild': a cancelled run stays cancelled
--       then pairs: job id, data
-- Answer: {added, repaired, known}: added = not there or only remnants, repaired = in a list but its hash was lost
local name, now_iso = ARGV[1], ARGV[2]
local listed, running = {}, {}
for _, key in ipairs({WAITING, INTERMEDIATE, PARKED}) do
  for _, id in ipairs(redis.call('LRANGE', key, 0, -1)) do listed[id] = true end
end
for _, composite in ipairs(redis.call('ZRANGE', RUNNING, 0, -1)) do
  local id, ex = split(composite)
  if id and owned(id, ex) then running[id] = true end
end
redis.call('SADD', RQ_QUEUES, WAITING)
if redis.call('LLEN', WAITING) == 0 then
  redis.call('ZADD', QUEUES, server_time(), name)
else
  redis.call('ZADD', QUEUES, 'NX', server_time(), name)
end

local KEPT = {'swathe_failures', 'swathe_deaths', 'swathe_bystander_deaths', 'swathe_history'}
local function write(id, data, status)
  local key = job_key(id)
  local kept = redis.call('HMGET', key, unpack(KEPT))
  local old = redis.call('HGET', key, 'status')
  redis.call('DEL', key)
  redis.call('HSET', key, 'created_at', now_iso, 'enqueued_at', now_iso, 'origin', name, 'data', data,
             'status', status, 'timeout', '-1', 'result_ttl', '0', 'worker_name', '')
  if old and old ~= 'failed' then  -- remnants of an accident keep their budget; what was set aside starts anew
    for i, field in ipairs(KEPT) do
      if kept[i] then redis.call('HSET', key, field, kept[i]) end
    end
  end
end

local added, repaired, known, gone = 0, 0, 0, {}
for i = 4, #ARGV, 2 do
  local run = run_of(ARGV[i])
  if gone[run] == nil then
    gone[run] = ARGV[3] == 'rebuild' and redis.call('SISMEMBER', CANCELLED, run) == 1
    if not gone[run] then redis.call('SREM', CANCELLED, run) end
  end
end
for i = 4, #ARGV, 2 do
  local id, data = ARGV[i], ARGV[i + 1]
  local status = redis.call('HGET', job_key(id), 'status')
  if gone[run_of(id)] then
    known = known + 1
  elseif running[id] then
    if status == 'started' then known = known + 1 else write(id, data, 'started'); repaired = repaired + 1 end
  elseif listed[id] then
    if status == 'queued' then
      redis.call('HSET', job_key(id), 'data', data)  -- its run may have been moved
      known = known + 1
    else
      write(id, data, 'queued'); repaired = repaired + 1
    end
  else
    for _, registry in ipairs({'finished', 'failed', 'deferred', 'scheduled', 'canceled'}) do
      redis.call('ZREM', P .. ':' .. registry .. ':' .. name, id)
    end
    write(id, data, 'queued')
    redis.call('RPUSH', WAITING, id)
    listed[id] = true
    added = added + 1
  end
end
return {added, repaired, known}
"""

_FILTER: Final = """
-- Splits a list of ids into those of one run (returned, in order) and the others (which stay).
local function take_run(key, run)
  local taken, kept = {}, {}
  for _, id in ipairs(redis.call('LRANGE', key, 0, -1)) do
    if run_of(id) == run then table.insert(taken, id) else table.insert(kept, id) end
  end
  if #taken > 0 then
    redis.call('DEL', key)
    for i = 1, #kept, 1000 do
      redis.call('RPUSH', key, unpack(kept, i, math.min(i + 999, #kept)))
    end
  end
  return taken
end
"""

RESUME: Final = (
    _FILTER
    + """
-- ARGV: 1 run id     Answer: how many parked jobs went back to the front, in their old order
redis.call('SREM', PAUSED, ARGV[1])
local ids = take_run(PARKED, ARGV[1])
for i = #ids, 1, -1 do redis.call('LPUSH', WAITING, ids[i]) end
return #ids
"""
)

CANCEL: Final = (
    _FILTER
    + """
-- Forget every job of a run. Ranges being computed lose their lease; what they store stays stored.
-- ARGV: 1 run id     Answer: how many jobs were removed
local run, count = ARGV[1], 0
redis.call('SREM', PAUSED, run)
redis.call('SADD', CANCELLED, run)
for _, key in ipairs({WAITING, INTERMEDIATE, PARKED}) do
  for _, id in ipairs(take_run(key, run)) do redis.call('DEL', job_key(id)); count = count + 1 end
end
for _, composite in ipairs(redis.call('ZRANGE', RUNNING, 0, -1)) do
  local id, ex = split(composite)
  if id and run_of(id) == run then
    release(id, ex, redis.call('HGET', execution_key(id, ex), 'worker_name'))
    redis.call('DEL', job_key(id))
    count = count + 1
  end
end
for _, id in ipairs(redis.call('ZRANGE', FAILED, 0, -1)) do
  if run_of(id) == run then redis.call('ZREM', FAILED, id); redis.call('DEL', job_key(id)); count = count + 1 end
end
return count
"""
)
