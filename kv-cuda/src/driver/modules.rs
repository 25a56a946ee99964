//! Kernels by name, and the code that is loaded for them.
//!
//! A unit is loaded when the first of its kernels is used, from the first of these that fits:
//! embedded machine code, code from a compiler on this machine, embedded PTX.
use std::collections::HashMap;
use std::env;
use std::ffi::{CString, c_int};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{
    self, CUfunction, CUfunction_attribute as Attribute, CUmodule, CUresult,
};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::invariant::Invariant;

use super::compile::Compiler;
use super::context::Context;
use super::dependent::{Dependent, Refusal};
use super::error::{DriverError, is_misfit, refuse};
use super::facts::{self, OPEN};
use super::options::CudaOptions;
use super::pool::DeviceMemory;
use crate::code::{self, Arch, Archive, CompileError, Unit};
use crate::gpu::Facts;

/// Environment variable with a folder of kernels to use instead of those of this build.
const SOURCES: &str = "KV_CUDA_SOURCES";

/// A kernel that can be launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Function {
    pub(super) raw: CUfunction,
    /// Bytes of its parameters, if the driver reports them.
    param_bytes: Option<usize>,
    /// Whether it may be launched before the previous kernel has ended.
    pub(super) dependent: Result<(), Refusal>,
}

// SAFETY: the driver lets any thread launch a function; the handle is never written through.
unsafe impl Send for Function {}

impl Function {
    /// Refuses parameters of another size than the kernel's.
    pub(super) fn require_params(self, kernel: &str, bytes: usize) -> Result<(), DeviceError> {
        match self.param_bytes {
            Some(expected) if expected != bytes => {
                let reason = format!("{kernel} takes {expected} bytes of parameters, not {bytes}");
                Err(refuse(DeviceErrorKind::Driver, "launch", reason))
            }
            _ => Ok(()),
        }
    }
}

/// The kernels of one device.
#[derive(Debug)]
pub(super) struct Modules {
    context: Arc<Context>,
    memory: Arc<DeviceMemory>,
    units: Vec<Unit<'static>>,
    machine: Option<Archive<'static>>,
    ptx: Option<Archive<'static>>,
    compiler: Compiler,
    shared_bytes_max: u32,
    pub(super) dependent: Dependent,
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    functions: HashMap<&'static str, Function>,
    /// By unit name.
    modules: HashMap<&'static str, Module>,
}

#[derive(Debug, Clone, Copy)]
struct Module {
    raw: CUmodule,
    /// What its code was compiled for.
    code: Arch,
}

// SAFETY: the driver lets any thread use a module; only the holder of the lock does.
unsafe impl Send for Module {}

/// Sources of code, in the order in which they are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Machine,
    Compiler,
    Ptx,
}

impl Modules {
    /// Creates an empty set of modules.
    ///
    /// # Errors
    /// `Unsupported` if the folder for kernels cannot be read or has none.
    pub(super) fn new(
        (context, memory): (&Arc<Context>, &Arc<DeviceMemory>),
        facts: &Facts,
        options: &CudaOptions,
    ) -> Result<Self, DeviceError> {
        let version = context.driver.version;
        let folder = options.sources.clone().or_else(|| env::var_os(SOURCES).map(PathBuf::from));
        let units = match folder {
            None => code::units(),
            Some(folder) => code::units_in(&folder).map_err(|error| {
                let reason = format!("kernels of {}: {error}", folder.display());
                refuse(DeviceErrorKind::Unsupported, OPEN, reason)
            })?,
        };
        // A damaged archive counts as absent: another origin serves, or the error says so.
        let archive = |arch| code::embedded(arch).and_then(Result::ok);
        Ok(Self {
            context: Arc::clone(context),
            memory: Arc::clone(memory),
            units,
            machine: Arch::shipped_for(facts.capability).and_then(archive),
            ptx: archive(Arch::PTX),
            compiler: Compiler::new(facts.capability, version, options),
            shared_bytes_max: facts.shared_bytes_max,
            dependent: Dependent::new(context.driver, options),
            loaded: Mutex::default(),
        })
    }

    /// Checks that kernels can be loaded, with the smallest of them.
    ///
    /// # Errors
    /// `Unsupported` with the problem of every origin of code.
    pub(super) fn probe(&self) -> Result<(), DeviceError> {
        let mut reasons = Vec::new();
        for origin in Origin::ALL {
            if origin == Origin::Compiler {
                match self.compiler.load() {
                    Ok(_) => return Ok(()),
                    Err(error) => reasons.push(error.to_string()),
                }
                continue;
            }
            let smallest = self.units.iter().filter_map(|unit| {
                let (archive, arch) = self.archive(origin)?;
                let entry = archive.entry(unit.name())?;
                (entry.key == unit.key(arch, archive.version))
                    .then_some((entry.image_bytes(), unit))
            });
            let Some((_, unit)) = smallest.min_by_key(|(bytes, _)| *bytes) else {
                reasons.push(format!("no {origin} of this build's sources"));
                continue;
            };
            match self.try_origin(unit, origin)? {
                Ok(module) => {
                    self.unload(&module);
                    return Ok(());
                }
                Err(reason) => reasons.push(reason),
            }
        }
        Err(self.no_code(OPEN, &reasons))
    }

    /// Returns a kernel, loaded on first use.
    ///
    /// # Errors
    /// `Unsupported` for a name that no unit exports and for a unit without fitting code; otherwise
    /// the driver's errors.
    pub(super) fn function(&self, kernel: &'static str) -> Result<Function, DeviceError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = loaded.functions.get(kernel) {
            return Ok(*function);
        }
        let unit = self.unit_of(kernel).ok_or_else(|| {
            refuse(DeviceErrorKind::Unsupported, LOAD, format!("no unit exports a kernel {kernel}"))
        })?;
        let name = unit.name();
        if !loaded.modules.contains_key(name) {
            let module = self.load(unit)?;
            loaded.modules.insert(name, module);
        }
        let module = *loaded.modules.get(name).invariant("a unit was loaded above");
        let function = self.find(module, kernel)?;
        loaded.functions.insert(kernel, function);
        Ok(function)
    }

    /// Finds the unit that exports a kernel: from the archives, else from the sources.
    fn unit_of(&self, kernel: &str) -> Option<&Unit<'static>> {
        let archives = [&self.machine, &self.ptx].into_iter().flatten();
        let entries = archives.flat_map(|archive| &archive.entries);
        let mut exporting = entries.filter(|entry| entry.kernels.iter().any(|name| name == kernel));
        let named =
            exporting.find_map(|entry| self.units.iter().find(|unit| unit.name() == entry.unit));
        named.or_else(|| code::exporting(&self.units, kernel))
    }

    /// Lists all kernels of the archives.
    #[cfg(test)]
    pub(super) fn kernels(&self) -> Vec<&'static str> {
        let archives = [&self.machine, &self.ptx].into_iter().flatten();
        let names = archives.flat_map(|archive| &archive.entries).flat_map(|entry| &entry.kernels);
        names.map(|name| &*name.clone().leak()).collect()
    }

    fn load(&self, unit: &Unit<'static>) -> Result<Module, DeviceError> {
        let mut reasons = Vec::new();
        for origin in Origin::ALL {
            match self.try_origin(unit, origin)? {
                Ok(module) => return Ok(module),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(self.no_code(LOAD, &reasons))
    }

    /// Returns a module from one origin, or why it has none.
    fn try_origin(
        &self,
        unit: &Unit<'static>,
        origin: Origin,
    ) -> Result<Result<Module, String>, DeviceError> {
        let image = match origin {
            Origin::Compiler => self.compiler.image(unit).map_err(|error| match error {
                // A mistake in our source is not a misfit of the machine, but has the same effect.
                CompileError::NoCompiler { .. } => error.to_string(),
                other => format!("the compiler: {other}"),
            }),
            _ => self.embedded(unit, origin),
        };
        match (image, self.target(origin)) {
            (Ok(image), Some(code)) => self.load_image(unit.name(), (origin, code), image),
            (Ok(_), None) => Ok(Err(format!("no {origin}"))),
            (Err(reason), _) => Ok(Err(reason)),
        }
    }

    /// Returns what code of an origin is compiled for, `None` for an origin without any.
    fn target(&self, origin: Origin) -> Option<Arch> {
        match origin {
            Origin::Machine => Arch::shipped_for(self.compiler.capability()),
            Origin::Compiler => self.compiler.load().ok().map(|(_, arch)| arch),
            Origin::Ptx => Some(Arch::PTX),
        }
    }

    /// Returns the reason for which kernels are launched one after another: that of the loaded
    /// ones, before any is loaded that of the first origin.
    pub(super) fn serial_launches(&self) -> Option<String> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let codes: Vec<_> = loaded.modules.values().map(|module| module.code).collect();
        drop(loaded);
        let first = || Origin::ALL.into_iter().find_map(|origin| self.target(origin));
        if codes.is_empty() {
            return first().and_then(|code| self.dependent.refusal(code));
        }
        codes.into_iter().find_map(|code| self.dependent.refusal(code))
    }

    fn archive(&self, origin: Origin) -> Option<(&Archive<'static>, Arch)> {
        let archive = match origin {
            Origin::Machine => self.machine.as_ref()?,
            Origin::Ptx => self.ptx.as_ref()?,
            Origin::Compiler => return None,
        };
        Some((archive, self.target(origin)?))
    }

    /// Returns the image of an archive, if it was compiled from this build's sources.
    fn embedded(&self, unit: &Unit<'static>, origin: Origin) -> Result<Vec<u8>, String> {
        let none = || format!("no {origin} of this build's {}", unit.name());
        let (archive, arch) = self.archive(origin).ok_or_else(none)?;
        let entry = archive.entry(unit.name()).ok_or_else(none)?;
        if entry.key != unit.key(arch, archive.version) {
            return Err(format!("{origin} of {} was compiled from other sources", unit.name()));
        }
        entry.image().map_err(|error| error.to_string())
    }

    /// Loads an image into the driver.
    fn load_image(
        &self,
        unit: &str,
        (origin, code_of): (Origin, Arch),
        mut image: Vec<u8>,
    ) -> Result<Result<Module, String>, DeviceError> {
        // PTX must end with a zero; machine code ignores it.
        image.push(0);
        // Allowed during a capture of this thread: nothing captured depends on loading.
        let _current = self.context.enter(LOAD)?.relax();
        let mut raw = std::ptr::null_mut();
        // SAFETY: an out-pointer for a module, an image that ends with a zero, and no options.
        let code = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut raw,
                image.as_ptr().cast(),
                0,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        if is_misfit(code) {
            return Ok(Err(format!("{origin} of {unit}: {}", DriverError(code))));
        }
        self.context.check(LOAD, code)?;
        Ok(Ok(Module { raw, code: code_of }))
    }

    /// Finds a kernel of a module, and allows it all of the device's shared memory.
    fn find(&self, module: Module, kernel: &str) -> Result<Function, DeviceError> {
        let _current = self.context.enter(LOAD)?.relax();
        let name = CString::new(kernel).unwrap_or_default();
        let mut raw = std::ptr::null_mut();
        // SAFETY: an out-pointer for a function, a module that is never unloaded before the
        // context, and a string that ends with a zero.
        let code = unsafe { sys::cuModuleGetFunction(&raw mut raw, module.raw, name.as_ptr()) };
        if code == CUresult::CUDA_ERROR_NOT_FOUND {
            let reason = format!("the code of its unit has no kernel {kernel}");
            return Err(refuse(DeviceErrorKind::Unsupported, LOAD, reason));
        }
        self.context.check(LOAD, code)?;
        let fixed = facts::number(LOAD, |value| {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            // SAFETY: an out-pointer for a number, and a function that was just found.
            unsafe { sys::cuFuncGetAttribute(value, attribute, raw) }
        })?;
        let dynamic = self.shared_bytes_max.saturating_sub(fixed);
        let dynamic = c_int::try_from(dynamic).unwrap_or(c_int::MAX);
        for (attribute, value) in [
            (Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic),
            // A multiprocessor waits until it is empty before it divides its memory in another way,
            // so all kernels get the division that attention needs.
            (Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, ALL_SHARED),
        ] {
            // SAFETY: a function that was just found.
            let code = unsafe { sys::cuFuncSetAttribute(raw, attribute, value) };
            self.context.check(LOAD, code)?;
        }
        let dependent = self.dependent.decide(module.code);
        Ok(Function { raw, param_bytes: self.param_bytes(raw), dependent })
    }

    fn param_bytes(&self, function: CUfunction) -> Option<usize> {
        let param_info = self.context.driver.optional.param_info?;
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: places for two sizes, and a function that was just found.
        let code = unsafe { param_info(function, 0, &raw mut offset, &raw mut bytes) };
        (code == CUresult::CUDA_SUCCESS).then_some(bytes)
    }

    fn unload(&self, module: &Module) {
        let Ok(current) = self.context.enter(LOAD) else { return };
        let _current = current.relax();
        // SAFETY: loaded once, and none of its functions is used any more.
        let code = unsafe { sys::cuModuleUnload(module.raw) };
        let _ = self.context.check(LOAD, code);
    }

    fn no_code(&self, operation: &'static str, reasons: &[String]) -> DeviceError {
        let version = self.context.driver.version;
        let reason =
            format!("no code for driver {version} and this device: {}", reasons.join("; "));
        refuse(DeviceErrorKind::Unsupported, operation, reason)
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        let modules = std::mem::take(&mut loaded.modules);
        // Launched kernels may still run on streams that are closed: every open stream holds a
        // reference to this. Other users of the context do not matter.
        let passed = self.memory.wait_for_closed();
        if passed.is_err() {
            // Leak the modules rather than unload a running kernel.
            return;
        }
        for module in modules.into_values() {
            self.unload(&module);
        }
    }
}

impl Origin {
    const ALL: [Self; 3] = [Self::Machine, Self::Compiler, Self::Ptx];
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Machine => "embedded machine code",
            Self::Compiler => "code compiled here",
            Self::Ptx => "embedded PTX",
        })
    }
}

const LOAD: &str = "load a kernel";

/// Percent of a multiprocessor's memory that is shared memory: as much as the card can.
const ALL_SHARED: c_int = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_have_the_kernels_size() {
        let function =
            |param_bytes| Function { raw: std::ptr::null_mut(), param_bytes, dependent: Ok(()) };
        assert!(function(Some(64)).require_params("copy", 64).is_ok());
        assert!(function(None).require_params("copy", 65).is_ok());
        let error = function(Some(64)).require_params("copy", 65).unwrap_err();
        assert!(error.to_string().contains("copy takes 64 bytes of parameters, not 65"));
    }
}
