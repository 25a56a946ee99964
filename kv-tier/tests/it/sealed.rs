//! Chunks that only who has the key can read.
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_core::events::Tier;
use kv_testkit::store::{StoreFixture, check_store, chunk_address, chunk_bytes};
use kv_tier::chunk::read_header;
use kv_tier::{
    BlockStore, ChunkAddress, ChunkError, MemoryStore, Put, SealedStore, StoreError, StoreErrorKind,
};

const KEY: [u8; 32] = [7; 32];
const OTHER: [u8; 32] = [8; 32];

struct Memory(Arc<MemoryStore>);

impl StoreFixture for Memory {
    fn open(&self) -> Result<Box<dyn BlockStore>, StoreError> {
        Ok(Box::new(SealedStore::new(Arc::clone(&self.0), &KEY)))
    }
}

#[test]
fn the_suite_of_stores_holds() {
    // A page more for each of the 40 largest chunks.
    check_store(&Memory(Arc::new(MemoryStore::new(96 << 20))));
}

#[cfg(target_os = "linux")]
#[test]
fn the_suite_of_stores_holds_on_disk() {
    use kv_tier::{DiskOptions, DiskStore};

    struct Disk(tempfile::TempDir);

    impl StoreFixture for Disk {
        fn open(&self) -> Result<Box<dyn BlockStore>, StoreError> {
            let options = DiskOptions::new(96 << 20).with_floor(0);
            let store = DiskStore::open(self.0.path(), options);
            let store = store.unwrap_or_else(|error| panic!("{error:?}"));
            Ok(Box::new(SealedStore::new(store, &KEY)))
        }
    }
    check_store(&Disk(tempfile::tempdir().unwrap()));
}

/// A store whose objects a test may look at and change.
#[derive(Debug, Default)]
struct Open(Mutex<HashMap<ChunkAddress, Vec<u8>>>);

impl BlockStore for Open {
    fn tier(&self) -> Tier {
        Tier::Store
    }
    fn contains(&self, chunks: &[ChunkAddress], _: Instant) -> Result<Vec<bool>, StoreError> {
        let objects = self.0.lock().unwrap();
        Ok(chunks.iter().map(|chunk| objects.contains_key(chunk)).collect())
    }
    fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        _: Instant,
    ) -> Result<Option<usize>, StoreError> {
        let objects = self.0.lock().unwrap();
        let Some(object) = objects.get(chunk) else { return Ok(None) };
        let Some(into) = into.get_mut(..object.len()) else {
            return Err(StoreError::new(StoreErrorKind::Corrupt, "read"));
        };
        into.copy_from_slice(object);
        Ok(Some(object.len()))
    }
    fn put(&self, chunk: &ChunkAddress, bytes: &[u8], _: Instant) -> Result<Put, StoreError> {
        self.0.lock().unwrap().insert(*chunk, bytes.to_vec());
        Ok(Put::New)
    }
    fn remove(&self, chunks: &[ChunkAddress], _: Instant) -> Result<(), StoreError> {
        self.0.lock().unwrap().retain(|address, _| !chunks.contains(address));
        Ok(())
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

const LENGTH: usize = 3 * 4096;

/// Reads a chunk.
fn read(store: &impl BlockStore, chunk: &ChunkAddress) -> Result<Option<Vec<u8>>, StoreError> {
    let mut into = vec![0; LENGTH];
    let Some(read) = store.get(chunk, &mut into, soon())? else { return Ok(None) };
    into.truncate(read);
    Ok(Some(into))
}

#[test]
fn nothing_of_a_chunk_is_in_its_object_or_its_address() {
    let (open, chunk) = (Arc::new(Open::default()), chunk_address(1, 2));
    let store = SealedStore::new(Arc::clone(&open), &KEY);
    let bytes = chunk_bytes(&chunk, LENGTH);
    let mut objects = Vec::new();
    for _ in 0..2 {
        store.put(&chunk, &bytes, soon()).unwrap();
        let kept = open.0.lock().unwrap();
        let (address, object) = kept.iter().next().unwrap();
        assert_eq!((kept.len(), object.len()), (1, 4096 + LENGTH));
        assert!(address.root != chunk.root && address.name != chunk.name);
        for part in bytes.chunks(16).chain([&chunk.name.as_bytes()[..16]]) {
            assert!(!object.windows(16).any(|window| window == part), "it is in the clear");
        }
        // Tools and programs without a key see that it is sealed, and leave it alone.
        let refused = read_header(object).unwrap_err();
        assert_eq!(refused, ChunkError::Sealed { flags: 1 });
        assert!(refused.kind().is_foreign());
        objects.push(object.clone());
    }
    assert_ne!(objects[0][..100], objects[1][..100], "a nonce is used once");
    assert_ne!(objects[0][4096..], objects[1][4096..]);
    let inner = MemoryStore::new(1).with_chunks_max(1);
    let shown = format!("{:?}", SealedStore::new(inner, &KEY));
    assert!(shown.contains("MemoryStore") && !shown.contains('7'), "{shown}");
}

#[test]
fn keys_share_a_place_without_meeting() {
    let (open, chunk) = (Arc::new(Open::default()), chunk_address(1, 2));
    let [mine, theirs] = [KEY, OTHER].map(|key| SealedStore::new(Arc::clone(&open), &key));
    let [a, b] = [chunk_bytes(&chunk, LENGTH), chunk_bytes(&chunk_address(3, 4), LENGTH)];
    mine.put(&chunk, &a, soon()).unwrap();
    assert_eq!(theirs.contains(&[chunk], soon()).unwrap(), [false]);
    assert_eq!(read(&theirs, &chunk).unwrap(), None);
    theirs.put(&chunk, &b, soon()).unwrap();
    assert_eq!(read(&mine, &chunk).unwrap(), Some(a));
    assert_eq!(read(&theirs, &chunk).unwrap(), Some(b));
    theirs.remove(&[chunk], soon()).unwrap();
    assert_eq!(mine.contains(&[chunk], soon()).unwrap(), [true]);
    assert_eq!(open.0.lock().unwrap().len(), 1);
}

#[test]
fn whatever_was_changed_is_refused() {
    let open = Arc::new(Open::default());
    let store = SealedStore::new(Arc::clone(&open), &KEY);
    let chunks = [chunk_address(1, 2), chunk_address(1, 3)];
    let mut places = Vec::new();
    for chunk in &chunks {
        store.put(chunk, &chunk_bytes(chunk, LENGTH), soon()).unwrap();
        let kept = open.0.lock().unwrap();
        places.extend(kept.keys().copied().filter(|at| !places.contains(at)).collect::<Vec<_>>());
    }
    let [object, another] = [0, 1].map(|at| open.0.lock().unwrap()[&places[at]].clone());
    let refused = |changed: Vec<u8>, what: &str| {
        open.0.lock().unwrap().insert(places[0], changed);
        let error = read(&store, &chunks[0]).expect_err(what);
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{what}: {error}");
    };
    for at in (0..64).chain([2000, 4087, 4088, 4095, 4096, 8191, 8192]).chain([object.len() - 1]) {
        for bit in [1, 0x80] {
            let mut changed = object.clone();
            changed[at] ^= bit;
            refused(changed, &format!("bit {bit} of byte {at}"));
        }
    }
    for length in [0, 1, 4095, 4096, 4097, object.len() - 1] {
        refused(object[..length].to_vec(), &format!("{length} bytes"));
    }
    refused([&object[..], b"x"].concat(), "a byte more");
    refused(another, "the object of another chunk");
    refused(chunk_bytes(&chunks[0], LENGTH), "bytes in the clear");
    let chunk = [&object[..4096], &chunk_bytes(&chunks[0], LENGTH)].concat();
    refused(chunk, "bytes in the clear behind a page");

    // A tag that fits the page, but not the bytes: the page's checksum is no protection.
    let mut forged = object.clone();
    forged[30] ^= 1;
    let sum = crc_of(&forged[..4088]);
    forged[4088..4096].copy_from_slice(&sum);
    refused(forged, "another tag");
    open.0.lock().unwrap().insert(places[0], object);
    assert_eq!(read(&store, &chunks[0]).unwrap(), Some(chunk_bytes(&chunks[0], LENGTH)));
}

/// CRC-64/NVME, bit by bit.
fn crc_of(bytes: &[u8]) -> [u8; 8] {
    let step = |crc: u64, byte: &u8| {
        (0..8).fold(crc ^ u64::from(*byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0x9a6c_9329_ac4b_c9b5 } else { 0 }
        })
    };
    (!bytes.iter().fold(!0_u64, step)).to_le_bytes()
}
