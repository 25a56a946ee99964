//! Digests of models and adapters.
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use blake3::Hasher;
use kv_core::UnknownName;
use kv_core::num::to_u64;

use crate::hex;

/// The identity of a model or an adapter: BLAKE3 of its weights and configuration.
///
/// Digesting reads all weights. A caller keeps the result, as text, where it changes with them:
/// `Display` and `FromStr` write and read 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelDigest([u8; 32]);

impl ModelDigest {
    /// Creates a digest from its bytes, such as a hash that a model registry gives.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Digests bytes in memory.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Digests a model folder or an adapter folder: its `*.safetensors` and `*.gguf` files, and
    /// `config.json` and `adapter_config.json` where they exist. Names and contents count, other
    /// files do not; links are followed.
    ///
    /// # Errors
    /// [`DigestError::NoWeights`] for a folder without weights, [`DigestError::Io`] if a file or
    /// the folder cannot be read.
    pub fn of(dir: &Path) -> Result<Self, DigestError> {
        let failed = |source| DigestError::Io { path: dir.to_owned(), source };
        let (mut paths, mut has_weights) = (Vec::new(), false);
        for entry in fs::read_dir(dir).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let is_weights = is_weights(&path);
            if is_weights || CONFIGS.iter().any(|name| path.ends_with(name)) {
                has_weights |= is_weights;
                paths.push(path);
            }
        }
        if !has_weights {
            return Err(DigestError::NoWeights { dir: dir.to_owned() });
        }
        Self::of_files(&paths)
    }

    /// Digests files, in the order of their names, in constant memory. The last parts of the paths
    /// count, the folders do not.
    ///
    /// # Errors
    /// [`DigestError::NoWeights`] without files, [`DigestError::Io`] for one that cannot be read.
    pub fn of_files<P: AsRef<Path>>(paths: &[P]) -> Result<Self, DigestError> {
        if paths.is_empty() {
            return Err(DigestError::NoWeights { dir: PathBuf::new() });
        }
        let name = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).to_owned();
        let mut files: Vec<_> = paths.iter().map(|p| (name(p.as_ref()), p.as_ref())).collect();
        files.sort_unstable();
        let mut hash = Hasher::new_derive_key(FILES_DOMAIN);
        for (name, path) in files {
            let name = name.as_encoded_bytes();
            hash.update(&to_u64(name.len()).to_le_bytes());
            hash.update(name);
            // Of fixed length, so the list is unambiguous.
            hash.update(of_file(path)?.as_bytes());
        }
        Ok(Self(*hash.finalize().as_bytes()))
    }
}

fn is_weights(path: &Path) -> bool {
    let extension = path.extension().and_then(OsStr::to_str);
    extension.is_some_and(|extension| matches!(extension, "safetensors" | "gguf"))
}

fn of_file(path: &Path) -> Result<blake3::Hash, DigestError> {
    let mut hash = Hasher::new();
    let read = File::open(path).and_then(|file| hash.update_reader(file).map(|_| ()));
    read.map_err(|source| DigestError::Io { path: path.to_owned(), source })?;
    Ok(hash.finalize())
}

/// Writes 64 lower-case hexadecimal digits.
impl fmt::Display for ModelDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex::write(&self.0, f)
    }
}

impl fmt::Debug for ModelDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Reads the form that `Display` writes, and no other.
impl FromStr for ModelDigest {
    type Err = UnknownName;
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        hex::read("digest of a model", text).map(Self)
    }
}

/// A model that cannot be digested.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DigestError {
    /// A file or the folder cannot be read.
    #[error("cannot read {path}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// No file has weights.
    #[error("no weights (*.safetensors, *.gguf) in {dir:?}")]
    NoWeights {
        /// The folder; empty for a list of files.
        dir: PathBuf,
    },
}

/// Files beside the weights that results depend on.
const CONFIGS: [&str; 2] = ["config.json", "adapter_config.json"];
const FILES_DOMAIN: &str = "kv-tier 2026-11 digest of the files of a model";
