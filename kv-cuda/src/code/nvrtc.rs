//! NVRTC, the compiler of kernels, as a library that is loaded on first use.
//!
//! Bound here and not through cudarc, which loads the first library from a list of names: a library
//! that a setting names must be the one that is used.
mod calls;

use std::ffi::{CString, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::Library;

use super::{Arch, Unit};
use calls::{Bytes, Calls, RawProgram, Size};

/// Output of the compiler.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compiled {
    /// Machine code, or PTX with a zero at its end.
    pub image: Vec<u8>,
    /// Messages of the compiler and the assembler.
    pub log: String,
}

/// The reason for which compiling failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompileError {
    /// No library of the compiler was found, or it lacks a function.
    NoCompiler {
        /// The searched places, and the system's message.
        reason: String,
    },
    /// A mistake in a source, or an unknown option.
    Refused {
        /// The unit.
        unit: String,
        /// The compiler's messages.
        log: String,
    },
    /// A failure of the compiler itself.
    Failed {
        /// The function that failed.
        call: &'static str,
        /// The compiler's name of the error.
        reason: String,
    },
}

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCompiler { reason } => write!(f, "no NVRTC: {reason}"),
            Self::Refused { unit, log } => write!(f, "{unit} does not compile: {}", log.trim()),
            Self::Failed { call, reason } => write!(f, "{call}: {reason}"),
        }
    }
}

impl std::error::Error for CompileError {}

/// The loaded compiler. It stays loaded until the program ends.
#[derive(Debug)]
pub struct Nvrtc {
    calls: Calls,
    version: u32,
    capabilities: Vec<u32>,
}

impl Nvrtc {
    /// The environment variable that names the library or its folder.
    pub const SETTING: &'static str = "KV_NVRTC";

    /// Loads the compiler: from `place` (a library or its folder), else from `KV_NVRTC`, else from
    /// where the system finds it.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`] if none can be loaded.
    pub fn load(place: Option<&Path>) -> Result<Self, CompileError> {
        let setting = || std::env::var_os(Self::SETTING).map(PathBuf::from);
        match place.map(Path::to_owned).or_else(setting) {
            Some(place) => Self::load_from(&place),
            None => Self::load_first(NAMES),
        }
    }

    fn load_first(names: &[&str]) -> Result<Self, CompileError> {
        let mut error = no_compiler("no library names are known");
        for name in names {
            match Self::open(Path::new(name)) {
                Ok(found) => return Ok(found),
                Err(next) => error = next,
            }
        }
        Err(match error {
            CompileError::NoCompiler { reason } => {
                no_compiler(format!("none of {} can be loaded; {reason}", names.join(", ")))
            }
            other => other,
        })
    }

    fn load_from(place: &Path) -> Result<Self, CompileError> {
        let library = if place.is_dir() {
            let none = || no_compiler(format!("none in {}", place.display()));
            newest(place, LIBRARY).ok_or_else(none)?
        } else {
            place.to_owned()
        };
        // The compiler loads its built-in functions by a bare file name, which works once they are
        // loaded.
        if let Some(builtins) = library.parent().and_then(|folder| newest(folder, BUILTINS)) {
            // SAFETY: runs the initialisers of NVIDIA's library, which have no preconditions.
            let builtins = unsafe { Library::new(builtins) };
            // If they are missing, the compiler reports it.
            let _ = builtins.map(ManuallyDrop::new);
        }
        Self::open(&library)
    }

    fn open(library: &Path) -> Result<Self, CompileError> {
        // SAFETY: runs the initialisers of NVIDIA's library, which have no preconditions.
        let library =
            unsafe { Library::new(library) }.map_err(|error| no_compiler(loader_error(&error)))?;
        let calls = Calls::find(&library)?;
        // Never unloaded: threads of the compiler may still run when the program ends.
        let _ = ManuallyDrop::new(library);
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid for writes.
        let code = unsafe { (calls.version)(&raw mut major, &raw mut minor) };
        calls.check("nvrtcVersion", code)?;
        let number = |number: c_int| u32::try_from(number).unwrap_or(0);
        let version = number(major) * 1000 + number(minor) * 10;
        let capabilities = calls.capabilities()?;
        Ok(Self { calls, version, capabilities })
    }

    /// Returns the version: 13000 for 13.0.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns the compute capabilities that it compiles for.
    pub fn capabilities(&self) -> &[u32] {
        &self.capabilities
    }

    /// Compiles a unit.
    ///
    /// # Errors
    /// [`CompileError::Refused`] with the log for a mistake in the source or the options; otherwise
    /// [`CompileError::Failed`].
    pub fn compile(&self, unit: &Unit<'_>, arch: Arch) -> Result<Compiled, CompileError> {
        let program = Program::new(&self.calls, unit)?;
        let options =
            unit.options(arch).iter().map(|text| c_string(text)).collect::<Result<Vec<_>, _>>()?;
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(options.len()).unwrap_or(c_int::MAX);
        // SAFETY: the program is alive, and `options` has `count` strings that outlive the call.
        let code = unsafe { (self.calls.compile)(program.raw, count, options.as_ptr()) };
        let log = program.text("nvrtcGetProgramLog", self.calls.log_size, self.calls.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        if code != 0 {
            let log = if log.trim().is_empty() { self.calls.word(code) } else { log };
            return Err(CompileError::Refused { unit: unit.name().to_owned(), log });
        }
        let image = if arch.is_ptx() {
            program.text("nvrtcGetPTX", self.calls.ptx_size, self.calls.ptx)?
        } else {
            program.text("nvrtcGetCUBIN", self.calls.cubin_size, self.calls.cubin)?
        };
        Ok(Compiled { image, log })
    }
}

/// A unit in the compiler, destroyed when dropped.
struct Program<'a> {
    calls: &'a Calls,
    raw: RawProgram,
}

impl<'a> Program<'a> {
    fn new(calls: &'a Calls, unit: &Unit<'_>) -> Result<Self, CompileError> {
        let (text, name) = (c_string(unit.text())?, c_string(unit.name())?);
        let strings = |of: fn(&super::Source<'_>) -> Result<CString, CompileError>| {
            unit.headers().iter().map(of).collect::<Result<Vec<_>, _>>()
        };
        let texts = strings(|header| c_string(header.text))?;
        let names = strings(|header| c_string(header.name))?;
        let texts: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
        let names: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let count = c_int::try_from(texts.len()).unwrap_or(0);
        let mut raw = None;
        // SAFETY: all strings end with a zero, both lists have `count` of them, and the library
        // copies them.
        let code = unsafe {
            (calls.create)(
                &raw mut raw,
                text.as_ptr(),
                name.as_ptr(),
                count,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        calls.check("nvrtcCreateProgram", code)?;
        let raw = raw.ok_or_else(|| no_compiler("the compiler returned no program"))?;
        Ok(Self { calls, raw })
    }

    /// Reads bytes whose number one function returns and which another function writes.
    fn text(&self, call: &'static str, size: Size, bytes: Bytes) -> Result<Vec<u8>, CompileError> {
        let mut length = 0;
        // SAFETY: the program is alive, and `length` is valid for writes.
        self.calls.check(call, unsafe { size(self.raw, &raw mut length) })?;
        let mut text = vec![0; length];
        if length > 0 {
            // SAFETY: the buffer has the length that the library has just returned.
            self.calls.check(call, unsafe { bytes(self.raw, text.as_mut_ptr().cast()) })?;
        }
        Ok(text)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        let mut raw = Some(self.raw);
        // SAFETY: made by `create` and not destroyed before. Its result changes nothing.
        let _ = unsafe { (self.calls.destroy)(ptr::from_mut(&mut raw)) };
    }
}

fn c_string(text: &str) -> Result<CString, CompileError> {
    CString::new(text).map_err(|error| CompileError::Failed {
        call: "nvrtcCreateProgram",
        reason: error.to_string(),
    })
}

fn no_compiler(reason: impl Into<String>) -> CompileError {
    CompileError::NoCompiler { reason: reason.into() }
}

/// Formats an error of the loader with the system's message, which only its source contains.
fn loader_error(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

/// Finds the file of a folder that begins like this; the newest by name.
fn newest(folder: &Path, begin: &[&str]) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            begin.iter().any(|begin| name.starts_with(begin))
        })
        .collect();
    found.sort();
    found.pop()
}

#[cfg(windows)]
const NAMES: &[&str] = &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];
#[cfg(not(windows))]
const NAMES: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
const LIBRARY: &[&str] = &["libnvrtc.so", "nvrtc64_"];
const BUILTINS: &[&str] = &["libnvrtc-builtins.so", "nvrtc-builtins64_"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::{Source, entry_points, report};

    #[test]
    fn a_missing_library_is_an_error_with_its_path() {
        let missing = Path::new("/nowhere/libnvrtc.so.13");
        let error = Nvrtc::load(Some(missing)).unwrap_err();
        assert!(matches!(error, CompileError::NoCompiler { .. }), "{error}");
        assert!(error.to_string().contains("/nowhere"), "{error}");
        let empty = tempfile::tempdir().unwrap();
        let error = Nvrtc::load(Some(empty.path())).unwrap_err().to_string();
        assert!(error.contains("none in "), "{error}");
        let error = Nvrtc::load_first(&["libno-such-thing.so"]).unwrap_err().to_string();
        assert!(error.contains("libno-such-thing.so"), "{error}");
    }

    #[test]
    fn the_newest_library_of_a_folder_is_found() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.alt.so.13", "other"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(newest(folder.path(), LIBRARY), Some(folder.path().join("libnvrtc.so.13")));
        assert_eq!(newest(folder.path(), BUILTINS), None);
        // Not a library: an error, not a crash.
        assert!(Nvrtc::load(Some(folder.path())).is_err());
    }

    /// Runs only where a compiler is: `KV_NVRTC` names it, or the system has one.
    #[test]
    fn a_trivial_kernel_compiles() {
        let nvrtc = match Nvrtc::load(None) {
            Ok(nvrtc) => nvrtc,
            Err(reason) => return println!("skipped: {reason}"),
        };
        let text = "// nvrtc: -DN=3\n#include \"twice.h\"\n\
            extern \"C\" __global__ void scale(float* x) { x[threadIdx.x] *= TWICE(N); }\n";
        let header = Source { name: "twice.h", text: "#define TWICE(x) (2 * (x))\n" };
        let source = Source { name: "scale.cu", text };
        let unit = Unit::new(source, &[header]);
        let machine = nvrtc.compile(&unit, "sm_80".parse().unwrap()).unwrap();
        assert_eq!(&machine.image[..4], b"\x7fELF");
        let kernels = report(&machine.log);
        assert_eq!((kernels[0].name.as_str(), kernels[0].spill_bytes), ("scale", 0));
        assert!(kernels[0].registers > 0);
        let ptx = nvrtc.compile(&unit, Arch::PTX).unwrap().image;
        assert_eq!(entry_points(&String::from_utf8_lossy(&ptx)), ["scale"]);
        assert!(nvrtc.capabilities().contains(&80) && nvrtc.version() >= 11000);

        let wrong = Unit::new(Source { name: "wrong.cu", text: "int f() { return x; }" }, &[]);
        let error = nvrtc.compile(&wrong, Arch::PTX).unwrap_err();
        let CompileError::Refused { unit, log } = &error else { panic!("{error}") };
        assert_eq!(unit, "wrong.cu");
        assert!(log.contains("\"x\" is undefined"), "{log}");
    }
}
