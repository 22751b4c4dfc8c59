"""The step compiler: turns a function of tensors into a training step with little overhead.

The entry point is :func:`compile_step`. It records the operations of a function and of its
gradients (``tracing.py``, ``recording.py``) and rewrites them into fewer and larger ones
(``rewriting.py``). It compiles the operations between matrix products with torch's compiler
(``fusing.py``, ``array_bounds.py``), and runs the result on several CUDA streams
(``cuda_streams.py``).

Other modules hold the optimiser (``adam.py``, compiled: ``fused_adam.py``), CUDA graphs of several
steps (``cuda_graphs.py``), and functions with hand-written gradients (``gradients.py``). This
package does not depend on models, schedules or metrics.
"""

from aevb.compiled_step.recording import CompiledStep, compile_step

__all__ = ["CompiledStep", "compile_step"]
