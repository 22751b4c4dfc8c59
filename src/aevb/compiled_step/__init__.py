"""The step compiler: from a function of tensors to a step that costs little more than its kernels.

:func:`compile_step` is the door. It records the operations of a function and of its gradients (``tracing.py``, ``recording.py``), rewrites them into
fewer and larger ones (``rewriting.py``), hands what lies between matrix products to torch's compiler (``fusing.py``, ``array_bounds.py``), and runs
them on several CUDA streams (``cuda_streams.py``). Beside it stand the end of a step, Adam (``adam.py``, compiled: ``fused_adam.py``), steps as CUDA
graphs (``cuda_graphs.py``), and functions whose gradients are written by hand (``gradients.py``). Nothing here knows of models, schedules or metrics.
"""

from aevb.compiled_step.recording import CompiledStep, compile_step

__all__ = ["CompiledStep", "compile_step"]
