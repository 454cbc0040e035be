"""Units, host facts, device profiles, the native core: what every other room builds on."""
