-- a command that needs next to no memory
return call(unpack(ARGV))
