//! The size of archives, and that they unpack themselves.
use std::process::Command;

use super::*;

const NONE: Weights = Weights { unpacked: 0, archive: 0, tree: 0 };

#[test]
fn the_size_of_an_archive_is_limited_by_the_tree() {
    assert_eq!(NONE.room(), 43_000_000);
    let at = |archive, tree| Weights { archive, tree, ..NONE }.check();
    assert!(at(43_000_000, 0).is_ok() && at(43_000_001, 0).is_err());
    // The tree that is sent along takes the rest of 64 MiB.
    assert!(at(43_000_000, 24_108_864).is_ok() && at(43_000_000, 24_108_865).is_err());
    let error = at(43_000_000, 30_000_000).unwrap_err().to_string();
    assert!(error.contains("43000000 bytes, 37108864 is the limit"), "{error}");
    assert!(at(1, u64::MAX).is_err());
}

#[test]
fn an_archive_is_a_file_or_in_a_folder() {
    assert_eq!(archive(Path::new("a/x.sh"), "abc"), Path::new("a/x.sh"));
    assert_eq!(archive(Path::new("a"), "abc"), Path::new("a/kv-gpu-abc.sh"));
}

/// The present tree: machine code, once, and data, uncompressed.
#[test]
fn machine_code_and_data_leave_room_for_programs() {
    /// Compressed programs without machine code: 9 MB when last packed.
    const PROGRAMS: u64 = 10_500_000;
    let mut files: Vec<_> = crate::gpu::kit::data(&[]).unwrap().into_values().collect();
    let compiled = fs::read_dir(shell::root().join("kv-cuda/kernels/compiled")).unwrap();
    files.extend(compiled.map(|entry| entry.unwrap().path()));
    let archive = files.iter().map(|file| fs::metadata(file).unwrap().len()).sum::<u64>();
    let weights = Weights { unpacked: 0, archive: archive + PROGRAMS, tree: tree().unwrap() };
    weights.check().unwrap();
}

/// Makes incompressible bytes.
fn noise(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        u8::try_from(state >> 56).unwrap()
    };
    (0..count).map(|_| next()).collect()
}

/// Packs a kit of programs that embed the same megabyte; `None` on a machine that cannot pack.
fn packed(folder: &Path) -> Option<PathBuf> {
    let [compressor, ..] = COMPRESSOR;
    if shell::output(Command::new(compressor).arg("--version")).is_none() {
        println!("skipped: no {compressor}");
        return None;
    }
    let kit = folder.join("kit");
    fs::create_dir_all(kit.join("bin")).unwrap();
    fs::create_dir_all(kit.join("a folder/below")).unwrap();
    for seed in 1..=5 {
        let program = [noise(seed, 10_000), noise(99, 1 << 20), noise(!seed, 5_000)];
        fs::write(kit.join(format!("bin/{seed}")), program.concat()).unwrap();
    }
    fs::write(kit.join("a folder/below/data"), "some data").unwrap();
    fs::write(kit.join("run.sh"), "#!/bin/sh\necho \"ran with $*\"\n").unwrap();
    shell::run(Command::new("chmod").arg("755").arg(kit.join("run.sh"))).unwrap();
    let archive = folder.join("kit.sh");
    let unpacked = write(&kit, &archive).unwrap();
    assert_eq!(unpacked, 5 * ((1 << 20) + 15_000) + 9 + 29);
    Some(archive)
}

fn says(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {message}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn common_content_is_packed_once_and_unpacks_itself() {
    let folder = tempfile::tempdir().unwrap();
    let Some(archive) = packed(folder.path()) else { return };
    let bytes = fs::metadata(&archive).unwrap().len();
    assert!(bytes > 1 << 20 && bytes < (1 << 20) + 150_000, "{bytes} bytes");
    // In an empty folder, the packed script runs with the arguments.
    let place = folder.path().join("elsewhere");
    fs::create_dir(&place).unwrap();
    let mut run = Command::new("sh");
    run.arg(&archive).args(["--device", "1"]).current_dir(&place);
    assert_eq!(says(&mut run), "ran with --device 1\n");
    for name in ["bin/1", "bin/5", "a folder/below/data"] {
        let unpacked = fs::read(place.join("kv-gpu").join(name)).unwrap();
        assert_eq!(unpacked, fs::read(folder.path().join("kit").join(name)).unwrap(), "{name}");
    }
    // A second time: old files of the kit are removed, reports stay.
    fs::write(place.join("kv-gpu/report.md"), "").unwrap();
    fs::write(place.join("kv-gpu/bin/old"), "").unwrap();
    let mut unpack = Command::new("sh");
    unpack.arg(&archive).arg("--unpack").current_dir(&place);
    assert_eq!(says(&mut unpack), "");
    assert!(place.join("kv-gpu/report.md").is_file());
    assert!(!place.join("kv-gpu/bin/old").exists());
}

/// Makes a folder with these tools only, as the `PATH` of a script.
fn tools(folder: &Path, names: &[&str]) -> PathBuf {
    let place = folder.join("tools");
    fs::create_dir(&place).unwrap();
    for name in names {
        let find = if *name == "python3" {
            "python3 -c 'import sys; print(sys.executable)'".to_owned()
        } else {
            format!("command -v {name}")
        };
        let found = says(Command::new("sh").args(["-c", &find]));
        std::os::unix::fs::symlink(found.trim(), place.join(name)).unwrap();
    }
    place
}

#[test]
fn a_kit_unpacks_by_python_or_names_the_missing_tools() {
    let folder = tempfile::tempdir().unwrap();
    let Some(archive) = packed(folder.path()) else { return };
    let shell = says(Command::new("sh").args(["-c", "command -v sh"]));
    let run = |path: &Path| {
        let mut run = Command::new(shell.trim());
        run.arg(&archive).current_dir(folder.path()).env("PATH", path);
        run
    };
    let path = tools(folder.path(), &["tar", "tail", "rm", "sh", "python3"]);
    assert_eq!(says(&mut run(&path)), "ran with \n");
    fs::remove_file(path.join("python3")).unwrap();
    let output = run(&path).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("neither xz nor python3"));
    // A folder of that name that is not a kit is left alone.
    fs::remove_dir_all(folder.path().join("kv-gpu")).unwrap();
    fs::create_dir_all(folder.path().join("kv-gpu/bin")).unwrap();
    assert_eq!(run(&path).output().unwrap().status.code(), Some(1));
    assert!(folder.path().join("kv-gpu/bin").is_dir());
}

#[test]
fn programs_larger_than_the_window_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let kit = folder.path().join("kit");
    fs::create_dir_all(kit.join("bin")).unwrap();
    for name in ["a", "b"] {
        // Without content: only their lengths matter.
        let file = File::create(kit.join("bin").join(name)).unwrap();
        file.set_len(WINDOW / 2 + 1).unwrap();
    }
    let error = write(&kit, &folder.path().join("kit.sh")).unwrap_err().to_string();
    assert!(error.contains("bin/a, bin/b have"), "{error}");
}
