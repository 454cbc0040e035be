"""Trials of umem under the engines of distributed training, on gloo and the software device.

`python -m distributed.run --help`, with the folder of tests on PYTHONPATH, runs them.
"""
