//! Lists kernel sources and, if present, archives of compiled kernels.
//!
//! Needs neither toolkit nor network: the files of `kernels/` are embedded. Without archives their
//! list is empty, and kernels are compiled when the device is opened.
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let kernels = PathBuf::from(var("CARGO_MANIFEST_DIR")?).join("kernels");
    println!("cargo::rerun-if-changed={}", kernels.display());
    let mut text = String::new();
    list(&mut text, "SOURCES", "&str", "include_str", &files(&kernels, &["cu", "h"])?)?;
    let archives = files(&kernels.join("compiled"), &["kva"])?;
    println!("cargo::rerun-if-changed={}", kernels.join("compiled").display());
    list(&mut text, "ARCHIVES", "&[u8]", "include_bytes", &archives)?;
    fs::write(PathBuf::from(var("OUT_DIR")?).join("kernels.rs"), text)?;
    Ok(())
}

fn var(name: &str) -> Result<String, Box<dyn Error>> {
    env::var(name).map_err(|error| format!("{name}: {error}").into())
}

/// Lists the files of a folder with one of these extensions, by name; none if the folder is
/// missing.
fn files(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut found = Vec::new();
    if folder.is_dir() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let extension = path.extension().and_then(|extension| extension.to_str());
            if extension.is_some_and(|extension| extensions.contains(&extension)) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Writes a constant with the name and the content of every file.
fn list(
    text: &mut String,
    name: &str,
    kind: &str,
    include: &str,
    files: &[PathBuf],
) -> Result<(), Box<dyn Error>> {
    writeln!(text, "const {name}: &[(&str, {kind})] = &[")?;
    for path in files {
        let file = path.file_name().and_then(|file| file.to_str()).ok_or("a name is not UTF-8")?;
        writeln!(text, "    ({file:?}, {include}!({:?})),", path.display().to_string())?;
    }
    writeln!(text, "];")?;
    Ok(())
}
