"""Benchmarks of FastGen: one harness, and workloads as files. See README.md beside this file."""
