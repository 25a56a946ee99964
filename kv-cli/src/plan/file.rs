//! Finds and reads the file that describes a model.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use kv_runner::ModelGeometry;
use kv_runner::gguf::is_further_part;

/// Largest size of a configuration file, far more than any has.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Reads a directory, a GGUF file or a `config.json`.
pub(super) fn read(path: &Path) -> anyhow::Result<ModelGeometry> {
    let file = if path.is_dir() { description(path)? } else { path.to_owned() };
    let is_gguf = file.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"));
    if is_gguf || begins_with(&file, b"GGUF")? {
        return Ok(ModelGeometry::read_gguf(&file)?);
    }
    let describe = || file.display().to_string();
    let bytes = fs::metadata(&file).with_context(describe)?.len();
    if bytes > CONFIG_BYTES_MAX {
        bail!("{}: {bytes} bytes are neither a config.json nor a GGUF file", describe());
    }
    Ok(ModelGeometry::read_config(&file)?)
}

/// Returns the file of a directory that describes its model.
fn description(dir: &Path) -> anyhow::Result<PathBuf> {
    let config = dir.join("config.json");
    if config.is_file() {
        return Ok(config);
    }
    let describe = || dir.display().to_string();
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).with_context(describe)? {
        let path = entry.with_context(describe)?.path();
        let is_gguf = path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"));
        if is_gguf && !is_further_part(&path) {
            files.push(path);
        }
    }
    files.sort();
    match files.as_slice() {
        [one] => Ok(one.clone()),
        [first, second, ..] => bail!(
            "{}: no config.json, and several GGUF files, such as {} and {}: give one of them",
            describe(),
            first.display(),
            second.display()
        ),
        // An error will name the missing file.
        [] => Ok(config),
    }
}

fn begins_with(path: &Path, magic: &[u8]) -> anyhow::Result<bool> {
    use std::io::Read;

    let describe = || path.display().to_string();
    let mut start = Vec::new();
    let length = u64::try_from(magic.len())?;
    let file = fs::File::open(path).with_context(describe)?;
    file.take(length).read_to_end(&mut start).with_context(describe)?;
    Ok(start == magic)
}
