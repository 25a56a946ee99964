//! The suite of stores on the stores of this crate.
use std::sync::Arc;

use kv_testkit::store::{StoreFixture, check_store};
use kv_tier::{BlockStore, MemoryStore, StoreError};

struct Memory;

impl StoreFixture for Memory {
    fn open(&self) -> Result<Box<dyn BlockStore>, StoreError> {
        Ok(Box::new(Arc::new(MemoryStore::new(64 << 20))))
    }

    fn keeps(&self) -> bool {
        false
    }
}

#[test]
fn memory() {
    check_store(&Memory);
}

#[cfg(target_os = "linux")]
mod disk {
    use kv_tier::{DirectIo, DiskOptions, DiskStore};
    use tempfile::TempDir;

    use super::*;

    struct Disk(TempDir, DiskOptions);

    impl StoreFixture for Disk {
        fn open(&self) -> Result<Box<dyn BlockStore>, StoreError> {
            let store = DiskStore::open(self.0.path(), self.1);
            Ok(Box::new(store.unwrap_or_else(|error| panic!("{error:?}"))))
        }
    }

    fn check(direct: DirectIo) {
        let options = DiskOptions::new(64 << 20).with_floor(0).with_direct(direct);
        check_store(&Disk(tempfile::tempdir().unwrap(), options));
    }

    #[test]
    fn direct() {
        check(DirectIo::Auto);
    }

    #[test]
    fn buffered() {
        check(DirectIo::Off);
    }

    /// The second store does not evict.
    #[test]
    fn beside_another_process() {
        let folder = tempfile::tempdir().unwrap();
        let options = DiskOptions::new(64 << 20).with_floor(0);
        let _first = DiskStore::open(folder.path(), options).unwrap();
        check_store(&Disk(folder, options));
    }
}
