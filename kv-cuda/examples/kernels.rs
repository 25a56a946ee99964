//! Compiles every kernel ahead of time; `cargo xtask kernels` runs it.
//!
//! Every unit is compiled for every shipped architecture, each in a process of its own: NVRTC
//! compiles one program at a time. Results are cached by key, so that only changes cost time.
//! Prints registers, shared memory and spills of every kernel; a spill is a failure. `--write`
//! makes the archives that the crate embeds, and compiles only what the present ones lack.
//! `--check` compiles nothing and reports whether the archives are current; `--unpack` compiles
//! nothing either, and writes the images of one architecture for programs that read them.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for a terminal")]

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

use kv_cuda::code::{self, Arch, Archive, Cache, KernelReport, Key, Nvrtc, Unit};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const USAGE: &str = "kernels --work DIR --archives DIR [--only UNIT] [--arch ARCH] \
                     [--write | --check]\n       kernels --archives DIR --arch ARCH --unpack DIR";

const MANIFEST: &str = "manifest.txt";

struct Options {
    /// Folder for compiled units and logs.
    work: PathBuf,
    /// Folder of the archives and their manifest.
    archives: PathBuf,
    only: Option<String>,
    arch: Option<Arch>,
    write: bool,
    check: bool,
    /// Folder for the images of the architecture.
    unpack: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    if let [command, unit, arch, image, log] = args.as_slice()
        && command == "compile"
    {
        return compile(unit, arch, Path::new(image), Path::new(log));
    }
    let options = parse(args)?;
    if let (Some(folder), Some(arch)) = (&options.unpack, options.arch) {
        return unpack(&options.archives, arch, folder);
    }
    // Archives name their compiler; the check needs none.
    let version = if options.check {
        compiler_version(&options.archives)?
    } else {
        Nvrtc::load(None)?.version()
    };
    let units: Vec<_> = code::units()
        .into_iter()
        .filter(|unit| options.only.as_ref().is_none_or(|only| only == unit.name()))
        .collect();
    if units.is_empty() {
        return Err("unknown unit".into());
    }
    // All units for one architecture before the next: most mistakes show for any architecture.
    let archs = options.arch.map_or_else(|| Arch::SHIPPED.to_vec(), |arch| vec![arch]);
    let jobs: Vec<_> = archs
        .iter()
        .flat_map(|arch| units.iter().map(|unit| (unit, *arch)))
        .map(|(unit, arch)| Compilation { unit, arch, key: unit.key(arch, version) })
        .collect();
    if options.check {
        return check(&jobs, version, &options.archives);
    }
    let kept = if options.write { kept(&jobs, &options.archives) } else { BTreeMap::new() };
    let (done, failures) = work(&jobs, &options.work, &kept)?;
    let spilling = table(&done);
    if !failures.is_empty() {
        let failures = failures.iter().map(|(why, archs)| format!("{}: {why}", archs.join(", ")));
        let failures: Vec<_> = failures.collect();
        return Err(format!("not everything compiles\n{}", failures.join("\n")).into());
    }
    if spilling > 0 {
        return Err(format!("{spilling} kernels spill registers").into());
    }
    if options.write {
        write(&done, version, &options.archives)?;
    }
    Ok(())
}

/// Returns the compiler version in the manifest of the archives.
fn compiler_version(archives: &Path) -> Result<u32> {
    let manifest = fs::read_to_string(archives.join(MANIFEST))?;
    let version = manifest.lines().next().and_then(|line| line.strip_prefix("nvrtc "));
    Ok(version.ok_or("the manifest names no compiler")?.parse()?)
}

fn parse(args: Vec<String>) -> Result<Options> {
    let (mut write, mut check) = (false, false);
    let (mut work, mut archives, mut only, mut arch) = (None, None, None, None);
    let mut unpack = None;
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(USAGE);
        match arg.as_str() {
            "--work" => work = Some(PathBuf::from(value()?)),
            "--archives" => archives = Some(PathBuf::from(value()?)),
            "--only" => only = Some(value()?),
            "--arch" => arch = Some(value()?.parse()?),
            "--unpack" => unpack = Some(PathBuf::from(value()?)),
            "--write" => write = true,
            "--check" => check = true,
            _ => return Err(USAGE.into()),
        }
    }
    if (only.is_some() || arch.is_some()) && (write || check) {
        return Err("archives hold all units for all architectures".into());
    }
    if unpack.is_some() {
        if arch.is_none() || work.is_some() || only.is_some() || write || check {
            return Err(USAGE.into());
        }
        work = Some(PathBuf::new());
    }
    let (work, archives) = work.zip(archives).ok_or(USAGE)?;
    Ok(Options { work, archives, only, arch, write, check, unpack })
}

/// Writes the images of an archive into a folder: `UNIT.cubin`, or `.ptx` for PTX.
fn unpack(archives: &Path, arch: Arch, folder: &Path) -> Result<()> {
    let path = archives.join(format!("{arch}.kva"));
    let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let archive = Archive::parse(&bytes).map_err(|error| format!("{arch}: {error}"))?;
    fs::create_dir_all(folder)?;
    let extension = if arch.is_ptx() { "ptx" } else { "cubin" };
    for entry in &archive.entries {
        let image = entry.image().map_err(|error| format!("{arch}: {}: {error}", entry.unit))?;
        // The name of a file of the sources, without a folder.
        let name = Path::new(&entry.unit).file_stem().ok_or("a unit without a name")?;
        fs::write(folder.join(name).with_extension(extension), image)?;
    }
    Ok(())
}

/// One compilation.
struct Compilation<'a> {
    unit: &'a Unit<'static>,
    arch: Arch,
    key: Key,
}

/// Result of a compilation.
#[derive(Clone)]
struct Compiled<'a> {
    job: &'a Compilation<'a>,
    image: Vec<u8>,
    log: String,
    /// Names of the kernels, if an archive had the unit: then there is no log.
    kept: Option<Vec<String>>,
}

impl Compiled<'_> {
    fn reports(&self) -> Vec<KernelReport> {
        code::report(&self.log)
    }

    fn kernels(&self) -> Vec<String> {
        if let Some(kept) = &self.kept {
            return kept.clone();
        }
        if self.job.arch.is_ptx() {
            return code::entry_points(&String::from_utf8_lossy(&self.image));
        }
        self.reports().into_iter().map(|kernel| kernel.name).collect()
    }
}

/// Compiles one unit for one architecture, in a child process.
fn compile(name: &str, arch: &str, image: &Path, log: &Path) -> Result<()> {
    let units = code::units();
    let unit = units.iter().find(|unit| unit.name() == name).ok_or("unknown unit")?;
    let compiled = Nvrtc::load(None)?.compile(unit, arch.parse()?)?;
    fs::write(log, compiled.log)?;
    fs::write(image, compiled.image)?;
    Ok(())
}

/// Architectures by error message: a mistake usually affects all of them.
type Failures = BTreeMap<String, Vec<String>>;

/// Returns the current units of the present archives, by index of the compilation. Archives with
/// spilling kernels are never written.
fn kept<'a>(jobs: &'a [Compilation<'a>], archives: &Path) -> BTreeMap<usize, Compiled<'a>> {
    let mut kept = BTreeMap::new();
    for arch in Arch::SHIPPED {
        let Ok(bytes) = fs::read(archives.join(format!("{arch}.kva"))) else { continue };
        // A damaged archive is written again.
        let Ok(archive) = Archive::parse(&bytes) else { continue };
        for (index, job) in jobs.iter().enumerate().filter(|(_, job)| job.arch == arch) {
            let entry = archive.entry(job.unit.name()).filter(|entry| entry.key == job.key);
            let image = entry.and_then(|entry| Some((entry, entry.image().ok()?)));
            if let Some((entry, image)) = image {
                let names = Some(entry.kernels.clone());
                kept.insert(index, Compiled { job, image, log: String::new(), kept: names });
            }
        }
    }
    kept
}

/// Runs all compilations, as many at a time as there are processors.
fn work<'a>(
    jobs: &'a [Compilation<'a>],
    folder: &Path,
    kept: &BTreeMap<usize, Compiled<'a>>,
) -> Result<(Vec<Compiled<'a>>, Failures)> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new((BTreeMap::new(), Failures::new()));
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(index) else { break };
                    let kept = kept.get(&index).cloned();
                    let result = kept.map_or_else(|| compiled(job, folder), Ok);
                    let Ok(mut done) = done.lock() else { break };
                    match result {
                        Ok(result) => _ = done.0.insert(index, result),
                        Err(error) => {
                            let archs = done.1.entry(error.to_string()).or_default();
                            archs.push(job.arch.to_string());
                        }
                    }
                }
            });
        }
    });
    let (done, failures) = done.into_inner().map_err(|_| "a thread panicked")?;
    Ok((done.into_values().collect(), failures))
}

fn compiled<'a>(job: &'a Compilation<'a>, folder: &Path) -> Result<Compiled<'a>> {
    // Two caches like that of a user's machine: for images, and for logs.
    let (images, logs) = (Cache::new(folder.join("images")), Cache::new(folder.join("logs")));
    let text = |log: Vec<u8>| String::from_utf8_lossy(&log).into_owned();
    if let (Some(image), Some(log)) = (images.load(job.key), logs.load(job.key)) {
        return Ok(Compiled { job, image, log: text(log), kept: None });
    }
    fs::create_dir_all(folder)?;
    let place = |kind| folder.join(format!("{}.{kind}.new", job.key));
    let (image, log) = (place("image"), place("log"));
    let mut child = Command::new(env::current_exe()?);
    child.args(["compile", job.unit.name(), &job.arch.to_string()]).arg(&image).arg(&log);
    let output = child.output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(said.trim().trim_start_matches("error: ").into());
    }
    let (code, said) = (fs::read(&image)?, text(fs::read(&log)?));
    let done = Compiled { job, image: code, log: said, kept: None };
    logs.store(job.key, done.log.as_bytes())?;
    images.store(job.key, &done.image)?;
    fs::remove_file(&image)?;
    fs::remove_file(&log)?;
    Ok(done)
}

/// Prints kernels by architecture; returns how many spill.
fn table(done: &[Compiled<'_>]) -> usize {
    let mut archs: Vec<Arch> = done.iter().map(|one| one.job.arch).collect();
    archs.sort();
    archs.dedup();
    archs.retain(|arch| !arch.is_ptx());
    let mut rows: BTreeMap<(String, String), BTreeMap<Arch, KernelReport>> = BTreeMap::new();
    for one in done {
        for kernel in one.reports() {
            let row = rows.entry((one.job.unit.name().to_owned(), kernel.name.clone()));
            row.or_default().insert(one.job.arch, kernel);
        }
    }
    let widest = rows.keys().map(|(_, kernel)| kernel.len()).max().unwrap_or(0);
    let mut text = format!("{:<widest$}", "kernel");
    for arch in &archs {
        let _ = write!(text, "  {:>9}", arch.to_string());
    }
    text.push_str("   registers, +static shared bytes, !spilled bytes\n");
    let mut spilling = 0_usize;
    let mut last = String::new();
    for ((unit, kernel), reports) in &rows {
        if *unit != last {
            let _ = writeln!(text, "{unit}");
            last.clone_from(unit);
        }
        let _ = write!(text, "{kernel:<widest$}");
        for arch in &archs {
            let cell = reports.get(arch).map_or_else(|| "-".to_owned(), cell);
            let _ = write!(text, "  {cell:>9}");
        }
        text.push('\n');
        let spills = reports.values().filter(|kernel| kernel.spill_bytes > 0);
        spilling = spilling.saturating_add(spills.count());
    }
    let kept = done.iter().filter(|one| one.kept.is_some()).count();
    println!("{text}{} kernels, {} images, {kept} of them kept", rows.len(), done.len());
    spilling
}

fn cell(kernel: &KernelReport) -> String {
    let mut cell = kernel.registers.to_string();
    if kernel.shared_bytes > 0 {
        let _ = write!(cell, "+{}", kernel.shared_bytes);
    }
    if kernel.spill_bytes > 0 {
        let _ = write!(cell, "!{}", kernel.spill_bytes);
    }
    cell
}

/// Writes an archive for every architecture, and the manifest, and removes other archives, which
/// the crate would embed.
fn write(done: &[Compiled<'_>], version: u32, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    for path in others(folder)? {
        fs::remove_file(&path)?;
        println!("{}: removed", path.display());
    }
    let mut manifest = format!("nvrtc {version}\n");
    for arch in Arch::SHIPPED {
        let of_arch = done.iter().filter(|one| one.job.arch == arch);
        let units: Vec<_> = of_arch
            .map(|one| {
                let (name, key) = (one.job.unit.name().to_owned(), one.job.key);
                (name, key, one.kernels(), one.image.clone())
            })
            .collect();
        if let Some((unit, ..)) = units.iter().find(|(.., kernels, _)| kernels.is_empty()) {
            return Err(format!("{unit} exports no kernel").into());
        }
        let bytes = code::pack(version, &units, |image| {
            zstd(image).unwrap_or_else(|| code::compress(image))
        })?;
        let path = folder.join(format!("{arch}.kva"));
        fs::write(&path, &bytes)?;
        let raw: usize = units.iter().map(|(.., image)| image.len()).sum();
        println!("{}: {} bytes of {raw}", path.display(), bytes.len());
        for (unit, key, kernels, image) in &units {
            let (kernels, bytes) = (kernels.len(), image.len());
            writeln!(manifest, "{key} {arch} {unit} {kernels} kernels {bytes} bytes")?;
        }
    }
    fs::write(folder.join(MANIFEST), manifest)?;
    Ok(())
}

/// Returns the archives of architectures that are not shipped.
fn others(folder: &Path) -> Result<Vec<PathBuf>> {
    let shipped = Arch::SHIPPED.map(|arch| format!("{arch}.kva"));
    let mut others = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let is_archive = path.extension().is_some_and(|extension| extension == "kva");
        if is_archive && !shipped.iter().any(|own| path.ends_with(own)) {
            others.push(path);
        }
    }
    Ok(others)
}

/// Compresses a frame with the `zstd` program, `None` if it is missing.
fn zstd(image: &[u8]) -> Option<Vec<u8>> {
    let mut command = Command::new("zstd");
    command.args(["-19", "--no-check", "--stdout", "--quiet", "-"]);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = piped.spawn().ok()?;
    let mut stdin = child.stdin.take()?;
    // The program reads while this thread writes; partial output is not used.
    let output = thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(image));
        child.wait_with_output()
    });
    output.ok().filter(|output| output.status.success()).map(|output| output.stdout)
}

/// Compares the archives with the sources; the error lists entries that are not current.
fn check(jobs: &[Compilation<'_>], version: u32, folder: &Path) -> Result<()> {
    let of_no_arch = others(folder)?.into_iter();
    let mut stale: Vec<_> =
        of_no_arch.map(|path| format!("{} is not shipped", path.display())).collect();
    for arch in Arch::SHIPPED {
        let path = folder.join(format!("{arch}.kva"));
        let Ok(bytes) = fs::read(&path) else {
            stale.push(format!("{} is missing", path.display()));
            continue;
        };
        let archive = Archive::parse(&bytes).map_err(|error| format!("{arch}: {error}"))?;
        if archive.version != version {
            let found = archive.version;
            stale.push(format!("{arch} was made by NVRTC {found}, this is {version}"));
            continue;
        }
        let of_arch: Vec<_> = jobs.iter().filter(|job| job.arch == arch).collect();
        for job in &of_arch {
            match archive.entry(job.unit.name()) {
                Some(entry) if entry.key == job.key => {
                    entry.image().map_err(|error| format!("{arch}: {error}"))?;
                }
                _ => stale.push(format!("{arch} has no current {}", job.unit.name())),
            }
        }
        if archive.entries.len() != of_arch.len() {
            stale.push(format!("{arch} has other units than the sources"));
        }
    }
    if stale.is_empty() {
        println!("archives are current");
        return Ok(());
    }
    let again = "write them with `cargo xtask kernels --write`";
    Err(format!("archives are not current; {again}\n{}", stale.join("\n")).into())
}
