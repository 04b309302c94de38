"""NamedKernel: a handle known by its name, whose kernel is had where and when it is first used."""

from typing import TYPE_CHECKING, Any, Final

from mlaprep.clients.errors import KernelUnavailable, NotCovered
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.operands import Operands
from mlaprep.clients.prepared import PreparedLaunch
from mlaprep.clients.switches import Switches
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.presets import PRESETS, Preset
from mlaprep.templates.spec import KernelSpec, parse_variant_id

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_VARIANT: Final = "mla_prepare_"
_FOLDED: Final = {name.replace("-", "_").replace(".", "_"): preset for name, preset in PRESETS.items()}
_MAX_NAME: Final = 512


def parse_name(name: str) -> tuple[KernelSpec, Arch | None] | None:
    """What a Python name stands for; None where it is no kernel's.

    A name is a preset's with its degree (``kimi_k3_tp8``; without one where there is only one), or a variant id
    (``mla_prepare_h12_r512_...``), dots and hyphens spelled ``_``; ``_sm_90a`` behind it names an architecture.
    """
    if len(name) > _MAX_NAME:
        return None
    stem, mark, suffix = name.rpartition("_sm_")
    try:
        arch = Arch(f"sm_{suffix}") if mark else None
        stem = stem if mark else name
        if stem.startswith(_VARIANT):
            return parse_variant_id(_VARIANT[:-1] + stem[len(_VARIANT) - 1 :].replace("_", "-")), arch
        folded, _, degree = stem.rpartition("_tp")
        preset = _FOLDED.get(folded)
        if preset is not None:
            spec = next((preset.spec(tp) for tp in preset.tp_degrees if str(tp) == degree), None)
        else:
            preset = _FOLDED.get(stem)
            spec = None if preset is None or len(preset.tp_degrees) != 1 else preset.spec(preset.tp_degrees[0])
    except SpecError:
        return None
    return None if spec is None else (spec, arch)


def spell_variant(spec: KernelSpec, arch: Arch | None = None) -> str:
    """The Python name of a variant; :func:`parse_name` reads it back."""
    name = spec.variant_id.replace("-", "_")
    return name if arch is None else f"{name}_{arch}"


def preset_names() -> list[str]:
    """The Python name of every preset at every degree."""
    return [name for folded, preset in _FOLDED.items() for name in _degrees(folded, preset)]


def _degrees(folded: str, preset: Preset) -> list[str]:
    alone = [folded] if len(preset.tp_degrees) == 1 else []
    return [*alone, *(f"{folded}_tp{tp}" for tp in preset.tp_degrees)]


class NamedKernel(KernelHandle):
    """A handle by name. Making one fetches nothing and touches no GPU, so a module may import it anywhere.

    Called with tensors, it takes their device; :meth:`load` takes one ahead, and answers with that device's own
    handle, which spares each call a look-up. The kernel comes from the default client.
    """

    def __init__(self, name: str, spec: KernelSpec, arch: Arch | None = None) -> None:
        self.name: Final = name
        self.spec = spec  # type: ignore[misc]  # the base takes it from an artifact, which is not there yet
        self._named_arch = arch
        self._switches = Switches.from_environment()
        self._driver = None
        self._told_unverified = False
        self._handles: dict[int, KernelHandle] = {}

    def __repr__(self) -> str:
        return f"NamedKernel({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return named_kernel, (self.name,)

    @property  # type: ignore[misc]  # the base's never changes, this one follows the device
    def arch(self) -> Arch:
        """The one in the name, else that of torch's current device.

        Raises:
            DriverError: no GPU, and no architecture in the name.
            KernelUnavailable: a GPU that no kernel is built for.
        """
        from mlaprep.clients.launch import cuda_driver, device_ordinal

        if self._named_arch is not None:
            return self._named_arch
        driver = cuda_driver()
        capability = driver.capability(device_ordinal(None))
        arch = Arch.for_device(capability)
        if arch is None:
            raise KernelUnavailable(
                f"asked for {self.name}, found a device of compute capability {capability[0]}.{capability[1]}, which "
                "no kernel is built for; use mlaprep.clients.prepare, or name an architecture: _sm_90a behind the name"
            )
        return arch

    @property  # type: ignore[misc]  # had when it is asked for
    def artifact(self) -> KernelArtifact:
        """The verified kernel for :attr:`arch`, from the default client; errors are those of its ``obtain``."""
        from mlaprep.clients.dispatch import default_client

        return default_client().artifact(self.spec, self.arch)

    def load(self, device: "int | torch.device | None" = None) -> KernelHandle:
        """The handle loaded on a device, torch's current one by default. Errors are those of ``KernelClient.load``."""
        from mlaprep.clients.dispatch import default_client
        from mlaprep.clients.launch import check_device, cuda_driver, device_ordinal

        check_device(device)
        cuda_driver()  # its error says more than torch's, where there is no GPU
        return default_client().load(self.spec, arch=self._named_arch, device=device_ordinal(device))

    def plan(self, operands: Operands, dcp_rank: int = 0, reserved_slot: int | None = None) -> PreparedLaunch:
        """As :meth:`KernelHandle.plan`, on the device of the operands."""
        return self.load(operands.device).plan(operands, dcp_rank, reserved_slot)

    def __call__(self, *tensors: "Tensor | None", **options: Any) -> "Tensor | None":
        """Launch on the device of the tensors; arguments, result and errors are those of :class:`KernelHandle`."""
        places = (getattr(tensor, "device", None) for tensor in (*tensors, *options.values()))
        device = next((place for place in places if getattr(place, "type", "") == "cuda"), None)
        handle = None if device is None else self._handles.get(device.index)
        if handle is None:
            covered = self.covers(*tensors, **options)
            if not covered:
                raise NotCovered(f"{self.name} does not cover this call: {covered.reason}")
            assert device is not None  # others are not covered
            handle = self._handles[device.index] = self.load(device)
        return handle(*tensors, **options)


def named_kernel(name: str) -> NamedKernel:
    """The handle of a Python name; unpickling comes here.

    Raises:
        SpecError: no kernel has that name.
    """
    from mlaprep.clients import kernels

    found: NamedKernel = kernels.find(name)
    return found
