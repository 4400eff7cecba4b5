"""The host API: collectives at once (`functional`), `ctx.ops` and `ctx.ccl`."""
