"""Schedules as tables: generators, checker, slots, simulator and text; plain Python."""
