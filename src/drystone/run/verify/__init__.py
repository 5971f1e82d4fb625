"""Verification of a machine: does everything that Drystone does work on these devices?"""
