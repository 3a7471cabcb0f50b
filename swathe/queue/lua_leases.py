"""Lua of a worker: claim, start, renew, acknowledge, fail, hand back, refuse, reap. KEYS: see ``scripts.py``."""

from typing import Final

CLAIM: Final = """
-- Take the next job and its lease in one step, so that a death in between can lose nothing.
-- ARGV: 1 worker  2 execution id  3 lease s  4 now (ISO, for display)  5.. run ids this worker does not serve
-- Answer: {'suspended'} | {'none'} | {'again'} (call again) | {'refused', id, reason} | {'job', id, field, value, ...}
local worker, ex, lease, now_iso = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
if redis.call('EXISTS', P .. ':suspended') == 1 then return {'suspended'} end

local function answer(id)
  local out = redis.call('HGETALL', job_key(id))
  table.insert(out, 1, id)
  table.insert(out, 1, 'job')
  return out
end

-- The same question again (the answer to the first was lost) gets the same job.
for _, composite in ipairs(redis.call('SMEMBERS', worker_executions(worker))) do
  local id, other = split(composite)
  if other == ex and owned(id, ex) then return answer(id) end
end

local skipped, skipping = {}, false
for i = 5, #ARGV do skipped[ARGV[i]] = true; skipping = true end

local function pop()
  if not skipping then return redis.call('LPOP', WAITING) end
  local from = 0
  while true do
    local ids = redis.call('LRANGE', WAITING, from, from + 999)
    if #ids == 0 then return false end
    for _, id in ipairs(ids) do
      if not skipped[run_of(id) or ''] then
        redis.call('LREM', WAITING, 1, id)
        return id
      end
    end
    from = from + 1000
  end
end

local function running_already(id)
  for _, other in ipairs(redis.call('ZRANGE', P .. ':executions:' .. id, 0, -1)) do
    if owned(id, other) then return true end
  end
  return false
end

local function foreign_field(id)
  local allowed = {@ALLOWED@}
  local fields = redis.call('HGETALL', job_key(id))
  for i = 1, #fields, 2 do
    if fields[i + 1] ~= '' and not allowed[fields[i]] then return fields[i] end
  end
  return nil
end

for _ = 1, 1000 do
  local id = pop()
  if not id then return {'none'} end
  local run = run_of(id)
  if run and redis.call('SISMEMBER', PAUSED, run) == 1 then
    redis.call('RPUSH', PARKED, id)
  elseif redis.call('EXISTS', job_key(id)) == 1 and not running_already(id) then
    local field = foreign_field(id)
    if field then
      local reason = 'refused: the job has a ' .. field .. ', swathe jobs have none'
      set_aside(id, reason, now_iso)
      return {'refused', id, reason}
    end
    local now, composite = server_time(), id .. ':' .. ex
    local stamp = string.format('%.6f', now)
    redis.call('ZADD', RUNNING, '+inf', composite)
    redis.call('ZADD', LEASES, now + lease, composite)
    redis.call('HSET', execution_key(id, ex), 'id', ex, 'job_id', id, 'created_at', stamp,
               'last_heartbeat', stamp, 'worker_name', worker, 'stage', 'read')
    redis.call('ZADD', P .. ':executions:' .. id, '+inf', ex)
    redis.call('SADD', worker_executions(worker), composite)
    redis.call('HSET', job_key(id), 'status', 'started', 'worker_name', worker, 'started_at', now_iso)
    return answer(id)
  end
end
return {'again'}
"""

START: Final = """
-- Say that the range goes onto the device now: if the process dies from here on, it is this range's death.
-- Ranges that left the device since the last call are its death no longer.
-- ARGV: 1 job id  2 execution id  3 lease s  then pairs of those that left: job id, execution id
-- Answer: 1, or 0 when the lease was taken away
local id, ex = ARGV[1], ARGV[2]
for i = 4, #ARGV, 2 do
  if owned(ARGV[i], ARGV[i + 1]) then redis.call('HSET', execution_key(ARGV[i], ARGV[i + 1]), 'stage', 'store') end
end
if not owned(id, ex) then return 0 end
redis.call('HSET', execution_key(id, ex), 'stage', 'compute')
redis.call('ZADD', LEASES, server_time() + tonumber(ARGV[3]), id .. ':' .. ex)
return 1
"""

RENEW: Final = """
-- Renew what is still held; never bring back what was taken away.
-- ARGV: 1 lease s  2 gap s  3 now (ISO)  then triples: job id, execution id, stage
-- Answer: the execution ids that are no longer held
local lease, now = tonumber(ARGV[1]), server_time()
tick(now, lease, tonumber(ARGV[2]))
local lost = {}
for i = 4, #ARGV, 3 do
  local id, ex, stage = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if owned(id, ex) then
    redis.call('ZADD', LEASES, now + lease, id .. ':' .. ex)
    redis.call('HSET', execution_key(id, ex), 'last_heartbeat', string.format('%.6f', now), 'stage', stage)
    if redis.call('EXISTS', job_key(id)) == 1 then redis.call('HSET', job_key(id), 'last_heartbeat', ARGV[3]) end
  else
    table.insert(lost, ex)
  end
end
return lost
"""

ACK: Final = """
-- The range is durable: forget the job.
-- ARGV: 1 job id  2 execution id  3 worker  4 seconds it took
-- Answer: 1, or 0 when the lease was taken away (nothing changes then)
local id, ex, worker = ARGV[1], ARGV[2], ARGV[3]
if not owned(id, ex) then return 0 end
release(id, ex, worker)
redis.call('DEL', job_key(id))
local key = P .. ':worker:' .. worker
if redis.call('EXISTS', key) == 1 then
  redis.call('HINCRBY', key, 'successful_job_count', 1)
  redis.call('HINCRBYFLOAT', key, 'total_working_time', ARGV[4])
end
return 1
"""

FAIL: Final = """
-- The range raised: spend one of its budget. With budget left it goes to the back, so that others come first;
-- without, it stays with its holder, who writes the durable marker and then acknowledges.
-- ARGV: 1 job id  2 execution id  3 worker  4 budget  5 history line
-- Answer: {0} not held | {n} failures so far, back in the queue | {n, history} budget spent, still held
local id, ex, worker = ARGV[1], ARGV[2], ARGV[3]
if not owned(id, ex) then return {0} end
if redis.call('EXISTS', job_key(id)) == 0 then release(id, ex, worker); return {0} end
remember(id, 'swathe_failures', ARGV[5])
local worker_key = P .. ':worker:' .. worker
if redis.call('EXISTS', worker_key) == 1 then redis.call('HINCRBY', worker_key, 'failed_job_count', 1) end
local failures = tonumber(redis.call('HGET', job_key(id), 'swathe_failures'))
if failures >= tonumber(ARGV[4]) then return {failures, redis.call('HGET', job_key(id), 'swathe_history')} end
release(id, ex, worker)
push_back(id, false)
redis.call('HINCRBY', REQUEUED, 'error', 1)
return {failures}
"""

HAND_BACK: Final = """
-- Jobs go back to the front, in the order given, without spending a retry.
-- ARGV: 1 worker  2 reason (counter)  3 field to count up in each job, or ''  4 history line, or ''
--       then pairs: job id, execution id
-- Answer: how many went back; those that were no longer held are left alone
local worker, count = ARGV[1], 0
for i = #ARGV - 1, 5, -2 do
  local id, ex = ARGV[i], ARGV[i + 1]
  if owned(id, ex) then
    release(id, ex, worker)
    if redis.call('EXISTS', job_key(id)) == 1 then remember(id, ARGV[3], ARGV[4]) end
    if push_back(id, true) then count = count + 1 end
  end
end
if count > 0 then redis.call('HINCRBY', REQUEUED, ARGV[2], count) end
return count
"""

REFUSE: Final = """
-- A claimed job whose body is not ours: strip it, set it aside with the reason. Nothing of it was executed.
-- ARGV: 1 job id  2 execution id  3 worker  4 reason  5 now (ISO)
-- Answer: 1, or 0 when the lease was taken away
local id, ex = ARGV[1], ARGV[2]
if not owned(id, ex) then return 0 end
release(id, ex, ARGV[3])
if redis.call('EXISTS', job_key(id)) == 1 then set_aside(id, ARGV[4], ARGV[5]) end
return 1
"""

_BURY: Final = """
-- The holders of these leases are dead: their jobs go to the front and a death is counted, on the job only where it was
-- on the device; one that was merely waiting in the dead process is a bystander. Returns the ids that went back.
local function bury(composites, how, now)
  local back, lost = {}, {}
  for _, composite in ipairs(composites) do
    local id, ex = split(composite)
    local e = redis.call('HMGET', execution_key(id, ex), 'worker_name', 'stage')
    local worker, stage = e[1] or '?', e[2] or '?'
    release(id, ex, worker)
    if redis.call('EXISTS', job_key(id)) == 1 then
      local field = stage == 'compute' and 'swathe_deaths' or 'swathe_bystander_deaths'
      remember(id, field, 'died: worker ' .. worker .. ' ' .. how .. ', stage ' .. stage ..
               ', unix time ' .. math.floor(now))
      table.insert(lost, id)
    end
  end
  table.sort(lost)  -- leases of one worker expire at slightly different times; the plan's order is kept
  for i = #lost, 1, -1 do
    if push_back(lost[i], true) then table.insert(back, 1, lost[i]) end
  end
  return back
end
"""

RELEASE_WORKER: Final = (
    _BURY
    + """
-- A worker's process is known to be dead (its supervisor saw it end): nothing needs to run out.
-- ARGV: 1 worker
-- Answer: ids that went back
local held = {}
for _, composite in ipairs(redis.call('SMEMBERS', worker_executions(ARGV[1]))) do
  local id, ex = split(composite)
  if id and owned(id, ex) then table.insert(held, composite) end
end
local back = bury(held, 'ended', server_time())
if #back > 0 then redis.call('HINCRBY', REQUEUED, 'death', #back) end
return back
"""
)

REAP: Final = (
    _BURY
    + """
-- Expired leases. Also ids stuck between pop and registration
-- (only workers that are not ours leave such), and registrations without a lease.
-- ARGV: 1 lease s  2 gap s
-- Answer: {seconds still to hold off, job id, job id, ...} (ids that went back)
local lease, now = tonumber(ARGV[1]), server_time()
local hold = tick(now, lease, tonumber(ARGV[2]))
if now < hold then return {math.ceil(hold - now)} end

local back = bury(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, 500),
                  'stopped renewing its lease', now)

if redis.call('ZCARD', RUNNING) ~= redis.call('ZCARD', LEASES) then
  for _, composite in ipairs(redis.call('ZRANGE', RUNNING, 0, -1)) do
    redis.call('ZADD', LEASES, 'NX', now + lease, composite)
    redis.call('ZADD', RUNNING, 'XX', '+inf', composite)
  end
  for _, composite in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
    if not redis.call('ZSCORE', RUNNING, composite) then redis.call('ZREM', LEASES, composite) end
  end
end

for _, id in ipairs(redis.call('LRANGE', INTERMEDIATE, 0, 999)) do
  redis.call('ZADD', STRAYS, 'NX', now, id)
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', STRAYS, '-inf', now - lease)) do
  redis.call('ZREM', STRAYS, id)
  if redis.call('LREM', INTERMEDIATE, 1, id) > 0 and redis.call('EXISTS', P .. ':executions:' .. id) == 0 then
    if push_back(id, true) then table.insert(back, 1, id) end
  end
end

if #back > 0 then redis.call('HINCRBY', REQUEUED, 'lease', #back) end
table.insert(back, 1, 0)
return back
"""
)
