//! Compiled code on disk, by key.
//!
//! Many processes may share a folder: entries appear atomically, and a damaged one counts as absent
//! and is written again. A result that cannot be written is not kept; errors of the disk never
//! become errors of the device.
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs, io, process};

use xxhash_rust::xxh3::xxh3_128;

use super::Key;

/// A folder of compiled units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Uses a folder, which is created with the first entry.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Uses `$XDG_CACHE_HOME/kv-cuda`, else `~/.cache/kv-cuda` (`%LOCALAPPDATA%\kv-cuda` on
    /// Windows); `None` if none of these is known.
    pub fn of_user() -> Option<Self> {
        Self::of_variables(|name| env::var_os(name).map(PathBuf::from))
    }

    fn of_variables(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<Self> {
        // A relative path would create a cache in whatever directory the program runs.
        let absolute = |name| variable(name).filter(|path| path.is_absolute());
        let folder = absolute("XDG_CACHE_HOME")
            .or_else(|| absolute("LOCALAPPDATA"))
            .or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
        Some(Self::new(folder.join("kv-cuda")))
    }

    /// Loads the image of a key.
    pub fn load(&self, key: Key) -> Option<Vec<u8>> {
        let mut bytes = fs::read(self.path(key)).ok()?;
        // The hash is last: tools that read machine code ignore it there.
        let (image, hash) = bytes.split_last_chunk::<16>()?;
        if xxh3_128(image).to_le_bytes() != *hash {
            return None;
        }
        let length = image.len();
        bytes.truncate(length);
        Some(bytes)
    }

    /// Stores the image of a key.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn store(&self, key: Key, image: &[u8]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let mut file = Temporary::create(&self.folder)?;
        file.write(image)?;
        file.write(&xxh3_128(image).to_le_bytes())?;
        file.rename(&self.path(key))
    }

    /// Loads the image of a key, or stores and returns the result of `make`.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn load_or<E>(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, E> {
        if let Some(image) = self.load(key) {
            return Ok(image);
        }
        let image = make()?;
        // A full or read-only disk only costs time at the next start.
        let _ = self.store(key, &image);
        Ok(image)
    }

    fn path(&self, key: Key) -> PathBuf {
        self.folder.join(format!("{key}.cubin"))
    }
}

/// A file under a name that no other process uses; removed unless it is renamed.
struct Temporary {
    path: PathBuf,
    file: Option<fs::File>,
}

impl Temporary {
    fn create(folder: &Path) -> io::Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("{}-{count}.tmp", process::id()));
        let file = fs::File::create(&path)?;
        Ok(Self { path, file: Some(file) })
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(bytes))
    }

    fn rename(mut self, to: &Path) -> io::Result<()> {
        // Windows does not rename open files.
        drop(self.file.take());
        fs::rename(&self.path, to)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        self.file.take();
        // Fails after a rename, because the file has moved.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key([3; 16]);

    fn names(folder: &Path) -> Vec<String> {
        let names = fs::read_dir(folder).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn an_image_is_compiled_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().join("deep/kv-cuda"));
        assert_eq!(cache.load(KEY), None);
        let made = cache.load_or(KEY, || Ok::<_, ()>(b"code".to_vec()));
        assert_eq!(made.unwrap(), b"code");
        let kept = cache.load_or(KEY, || Err("compiled again"));
        assert_eq!(kept.unwrap(), b"code");
        assert_eq!(cache.load(Key([4; 16])), None);
        assert_eq!(cache.load_or(Key([4; 16]), || Err("no compiler")), Err("no compiler"));
        assert_eq!(names(&cache.folder), [format!("{KEY}.cubin")], "no temporary file is left");
    }

    #[test]
    fn damaged_images_are_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path());
        cache.store(KEY, b"good code").unwrap();
        let whole = fs::read(cache.path(KEY)).unwrap();
        let mut flipped = whole.clone();
        flipped[2] ^= 1;
        for damaged in [&whole[..whole.len() - 1], &whole[..5], &[], &flipped] {
            fs::write(cache.path(KEY), damaged).unwrap();
            assert_eq!(cache.load(KEY), None);
            let image = cache.load_or(KEY, || Ok::<_, ()>(b"good code".to_vec()));
            assert_eq!(image.unwrap(), b"good code");
            assert_eq!(fs::read(cache.path(KEY)).unwrap(), whole);
        }
    }

    #[test]
    fn a_read_only_disk_is_not_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a file, not a folder");
        fs::write(&file, "").unwrap();
        let cache = Cache::new(&file);
        assert!(cache.store(KEY, b"code").is_err());
        assert_eq!(cache.load_or(KEY, || Ok::<_, ()>(b"code".to_vec())).unwrap(), b"code");
    }

    #[test]
    fn many_writers_leave_one_whole_entry() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path());
        let images: Vec<Vec<u8>> = (0..4_u8).map(|byte| vec![byte; 40_000]).collect();
        std::thread::scope(|scope| {
            for image in &images {
                scope.spawn(|| {
                    for _ in 0..50 {
                        cache.store(KEY, image).unwrap();
                        let seen = cache.load(KEY).expect("whole at any moment");
                        assert!(images.contains(&seen));
                    }
                });
            }
        });
        assert_eq!(names(folder.path()).len(), 1);
    }

    #[test]
    fn the_folder_comes_from_the_environment() {
        let of = |set: &[(&str, &str)]| {
            let find =
                |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, at)| at.into());
            Cache::of_variables(find).map(|cache| cache.folder)
        };
        let home = ("HOME", "/home/user");
        assert_eq!(of(&[home, ("XDG_CACHE_HOME", "/var/c")]), Some("/var/c/kv-cuda".into()));
        assert_eq!(of(&[home, ("XDG_CACHE_HOME", "c")]), Some("/home/user/.cache/kv-cuda".into()));
        assert_eq!(of(&[home]), Some("/home/user/.cache/kv-cuda".into()));
        assert_eq!(of(&[]), None);
    }
}
