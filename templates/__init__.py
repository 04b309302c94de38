"""What can be generated: specifications, presets, and the CUDA source rendered from them.

Imports nothing else of mlaprep; needs the standard library and jinja2 only.
"""
