//! Memory limits of Linux: of the machine, and of the control groups of this process.
//!
//! # Source
//! `proc(5)`, and in the kernel's documentation `admin-guide/cgroup-v2.rst` and
//! `admin-guide/cgroup-v1/memory.rst`.
use std::path::{Component, Path, PathBuf};

/// Memory that this process may still take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Available {
    pub(super) bytes: u64,
    /// Whether the limit is the machine's, not a control group's.
    pub(super) is_machine: bool,
    /// Memory of its own that the process has written, which is not available any more.
    pub(super) written: u64,
}

/// Returns the memory that is available to this process, `None` without a report of the system.
pub(super) fn of_this_process() -> Option<Available> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    read(&|path| std::fs::read_to_string(path).ok())
}

/// Does so with the files that `file` reads.
fn read(file: &dyn Fn(&Path) -> Option<String>) -> Option<Available> {
    let of_machine = kibibytes(&file(Path::new("/proc/meminfo"))?, "MemAvailable:")?;
    let status = file(Path::new("/proc/self/status")).unwrap_or_default();
    let written = kibibytes(&status, "RssAnon:").unwrap_or(0);
    let of_groups = folders(file).iter().filter_map(|folder| folder.room(file)).min();
    let bytes = of_groups.map_or(of_machine, |room| room.min(of_machine));
    Some(Available { bytes, is_machine: bytes == of_machine, written })
}

/// Returns the bytes of a line such as `MemAvailable:   24159191 kB`.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The folder of a control group that limits memory.
#[derive(Debug, PartialEq, Eq)]
struct Folder {
    path: PathBuf,
    version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// Returns the control groups of this process, with all that they are part of: each has a limit.
fn folders(file: &dyn Fn(&Path) -> Option<String>) -> Vec<Folder> {
    let groups = file(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let mounts = file(Path::new("/proc/self/mountinfo")).unwrap_or_default();
    let mut folders = Vec::new();
    for (version, root, mount) in mounts.lines().filter_map(mounted) {
        let Some(group) = groups.lines().find_map(|line| group_of(line, version)) else {
            continue;
        };
        // A container sees its own group as the root of the mount, and maybe a path of its host.
        let below = Path::new(group).strip_prefix(root).unwrap_or(Path::new(""));
        let is_inside = below.components().all(|part| matches!(part, Component::Normal(_)));
        let below = if is_inside { below } else { Path::new("") };
        let all = below.ancestors().map(|part| Path::new(mount).join(part));
        folders.extend(all.map(|path| Folder { path, version }));
    }
    folders
}

/// Reads a line of `mountinfo`: the version, the group that is its root, and where it is mounted.
/// `None` for other file systems, and for controllers of other things.
fn mounted(line: &str) -> Option<(Version, &str, &str)> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let (root, place) = (mount.next()?, mount.next()?);
    let mut kind = kind.split(' ');
    let version = match (kind.next()?, kind.nth(1)?) {
        ("cgroup2", _) => Version::Two,
        ("cgroup", options) if options.split(',').any(|name| name == "memory") => Version::One,
        _ => return None,
    };
    Some((version, root, place))
}

/// Reads a line of `/proc/self/cgroup`, such as `0::/user.slice` or `5:memory:/user.slice`.
fn group_of(line: &str, version: Version) -> Option<&str> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let is_it = match version {
        Version::One => controllers.split(',').any(|name| name == "memory"),
        Version::Two => controllers.is_empty(),
    };
    is_it.then_some(path)
}

impl Folder {
    /// Returns the bytes that may still be taken, `None` without a limit.
    fn room(&self, file: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
        let (limit, usage, pages) = match self.version {
            Version::One => (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ["total_inactive_file ", "total_active_file "],
            ),
            Version::Two => ("memory.max", "memory.current", ["inactive_file ", "active_file "]),
        };
        let text = |name: &str| file(&self.path.join(name));
        let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
        // `max` is no number.
        let limit = number(limit)?;
        let stat = text("memory.stat").unwrap_or_default();
        // Pages of files are dropped before the limit is reached.
        let dropped = pages.iter().filter_map(|name| {
            stat.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok()
        });
        // The system may report anything.
        let dropped = dropped.fold(0, u64::saturating_add);
        let usage = number(usage).unwrap_or(0).saturating_sub(dropped);
        Some(limit.saturating_sub(usage))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const MIB: u64 = 1 << 20;
    const MEMINFO: (&str, &str) =
        ("/proc/meminfo", "MemTotal:       8192 kB\nMemAvailable:   4096 kB\nSwapFree: 99999 kB\n");
    const STATUS: (&str, &str) = ("/proc/self/status", "VmRSS:\t 700 kB\nRssAnon:\t     512 kB\n");
    const V2: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";

    fn available(files: &[(&str, &str)]) -> Option<Available> {
        let files: HashMap<_, _> = files.iter().copied().collect();
        read(&|path| files.get(path.to_str()?).map(|text| (*text).to_owned()))
    }

    #[track_caller]
    fn assert_bytes(files: &[(&str, &str)], bytes: u64) {
        let files = [&[MEMINFO, STATUS], files].concat();
        let got = available(&files).unwrap();
        let is_machine = bytes == 4 * MIB;
        assert_eq!(got, Available { bytes, is_machine, written: MIB / 2 });
    }

    #[test]
    fn a_machine_without_groups_has_what_it_says() {
        assert_bytes(&[], 4 * MIB);
        assert_bytes(&[("/proc/self/cgroup", "0::/\n"), ("/proc/self/mountinfo", V2)], 4 * MIB);
        assert_eq!(available(&[]), None);
        assert_eq!(available(&[("/proc/meminfo", "MemTotal: 8 kB\n")]), None);
        assert_eq!(available(&[("/proc/meminfo", "MemAvailable: x kB\n")]), None);
        let only = available(&[MEMINFO]).unwrap();
        assert_eq!((only.bytes, only.written), (4 * MIB, 0));
    }

    #[test]
    fn the_smallest_limit_of_all_groups_above_counts() {
        let files = [
            ("/proc/self/cgroup", "1:name=systemd:/other\n0::/kv.slice/serve.service\n"),
            ("/proc/self/mountinfo", V2),
            ("/sys/fs/cgroup/kv.slice/serve.service/memory.max", "max\n"),
            ("/sys/fs/cgroup/kv.slice/serve.service/memory.current", "999999\n"),
            ("/sys/fs/cgroup/kv.slice/memory.max", "3145728\n"),
            ("/sys/fs/cgroup/kv.slice/memory.current", "2097152\n"),
            (
                "/sys/fs/cgroup/kv.slice/memory.stat",
                "anon 1\ninactive_file 524288\nactive_file 524288\nslab 7\n",
            ),
        ];
        // 3 - (2 - 1) MiB: pages of files do not count.
        assert_bytes(&files, 2 * MIB);
        // A group that is full, or has more than it may: nothing is left.
        let mut full = files;
        full[5].1 = "99999999\n";
        assert_bytes(&full, 0);
        // A limit above the machine's memory is none.
        let mut large = files;
        large[4].1 = "999999999999\n";
        assert_bytes(&large, 4 * MIB);
    }

    #[test]
    fn a_container_sees_its_group_as_the_root() {
        for group in ["0::/\n", "0::/docker/8f2/serve\n", "0::/../../kv\n"] {
            let files = [
                ("/proc/self/cgroup", group),
                ("/proc/self/mountinfo", V2),
                ("/sys/fs/cgroup/memory.max", "1048576"),
                ("/sys/fs/cgroup/memory.current", "0"),
            ];
            assert_bytes(&files, MIB);
        }
    }

    #[test]
    fn version_one_has_a_mount_of_its_own() {
        let mounts = "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                      32 23 0:28 /docker/8f2 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      33 23 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                      nonsense\n";
        let files = [
            ("/proc/self/cgroup", "9:cpu,cpuacct:/x\n5:memory:/docker/8f2/inner\n0::/docker/8f2\n"),
            ("/proc/self/mountinfo", mounts),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "3145728\n"),
            ("/sys/fs/cgroup/memory/inner/memory.usage_in_bytes", "2097152\n"),
            (
                "/sys/fs/cgroup/memory/inner/memory.stat",
                "inactive_file 9\ntotal_inactive_file 1048576\ntotal_active_file 0\n",
            ),
        ];
        assert_bytes(&files, 2 * MIB);
    }
}
