"""Scripts: what must happen at once in a shared Redis, in its own Lua."""

from typing import Final

_BUMP: Final = """
local function bump(revision)
  if redis.call('EXISTS', revision) == 0 then
    -- Begin at the clock: after a flush no revision comes again.
    local now = redis.call('TIME')
    redis.call('SET', revision, now[1] .. string.format('%06d', tonumber(now[2])))
  end
  return redis.call('INCR', revision)
end
"""

_RESIZE: Final = """
local function resize(sizes, total, key, size)
  local change = size - (tonumber(redis.call('HGET', sizes, key)) or 0)
  if size > 0 then redis.call('HSET', sizes, key, size) else redis.call('HDEL', sizes, key) end
  redis.call('INCRBY', total, change)
end
"""

PUBLISH: Final = (
    _BUMP
    + _RESIZE
    + """
-- KEYS: record, cubin, source, holders, index, sizes, total, revision.
-- ARGV: manifest, cubin, source, key, size, seconds.
-- The record comes last: whoever sees it sees its blobs.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[6])
redis.call('SET', KEYS[3], ARGV[3], 'EX', ARGV[6])
redis.call('SADD', KEYS[4], ARGV[4])
redis.call('EXPIRE', KEYS[4], ARGV[6])
resize(KEYS[6], KEYS[7], ARGV[4], tonumber(ARGV[5]))
redis.call('ZADD', KEYS[5], bump(KEYS[8]), ARGV[4])
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[6])
return 1
"""
)
"""1 where the record is new; 0 where there is one already, which stays."""

REPLACE: Final = (
    _BUMP
    + """
-- KEYS: record, index, revision. ARGV: manifest as it was read, the new one, key, seconds.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[4])
redis.call('ZADD', KEYS[2], bump(KEYS[3]), ARGV[3])
return 1
"""
)
"""Gives a record another manifest, unless it has changed since it was read."""

DELETE: Final = (
    _BUMP
    + _RESIZE
    + """
-- KEYS: record, index, sizes, total, revision, then holders and blob of the cubin if that is known. ARGV: key.
local gone = redis.call('DEL', KEYS[1])
resize(KEYS[3], KEYS[4], ARGV[1], 0)
if redis.call('ZREM', KEYS[2], ARGV[1]) == 1 then bump(KEYS[5]) end
if KEYS[6] and redis.pcall('SREM', KEYS[6], ARGV[1]) and redis.pcall('SCARD', KEYS[6]) == 0 then
  redis.call('DEL', KEYS[7])
end
return gone
"""
)

DROP: Final = """
-- KEYS: names. ARGV: for each, what was read of it: its first bytes, as many as the last of ARGV.
-- Only what is still as it was found goes; what has been made good meanwhile stays.
local gone = 0
for i, name in ipairs(KEYS) do
  local found = redis.pcall('GETRANGE', name, 0, ARGV[#KEYS + 1])
  if type(found) == 'table' or found == ARGV[i] then gone = gone + redis.call('DEL', name) end
end
return gone
"""

FORGET: Final = (
    _BUMP
    + _RESIZE
    + """
-- KEYS: index, sizes, total, revision. ARGV: prefix of records, then keys. Takes out of the index what has expired.
local gone = 0
for i = 2, #ARGV do
  if redis.call('EXISTS', ARGV[1] .. ARGV[i]) == 0 then
    resize(KEYS[2], KEYS[3], ARGV[i], 0)
    gone = gone + redis.call('ZREM', KEYS[1], ARGV[i])
  end
end
if gone > 0 then bump(KEYS[4]) end
return gone
"""
)

ACQUIRE: Final = """
-- KEYS: lease, record. ARGV: token, milliseconds.
if redis.call('EXISTS', KEYS[2]) == 1 then return 'built' end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 'held' end
if redis.pcall('GET', KEYS[1]) == ARGV[1] then return 'held' end
return 'taken'
"""

RENEW: Final = """
-- KEYS: leases. ARGV: their tokens, milliseconds. How many are still those tokens'.
local kept = 0
for i, lease in ipairs(KEYS) do
  if redis.pcall('GET', lease) == ARGV[i] then kept = kept + redis.call('PEXPIRE', lease, ARGV[#KEYS + 1]) end
end
return kept
"""

RELEASE: Final = """
-- KEYS: lease. ARGV: token. Another's lease stays.
if redis.pcall('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
