//! Every fault does what it says.
use kv_tier::MemoryStore;

use super::*;
use crate::store::{chunk_address, chunk_bytes, soon};

/// A store with chunks 1 and 2, whose next calls have these faults.
fn store(faults: &[Option<Fault>]) -> FaultStore<MemoryStore> {
    let store = FaultStore::new(MemoryStore::new(1 << 20), FaultSchedule::listed(&[]));
    for n in [1, 2] {
        let chunk = chunk_address(0, n);
        store.put(&chunk, &chunk_bytes(&chunk, 100), soon()).unwrap();
    }
    store.set_schedule(FaultSchedule::listed(faults));
    store
}

fn read(store: &FaultStore<MemoryStore>, n: u64) -> Result<Option<Vec<u8>>, StoreErrorKind> {
    let mut into = vec![0; 200];
    let length = store.get(&chunk_address(0, n), &mut into, soon());
    length.map(|l| l.map(|l| into[..l].to_vec())).map_err(|error| error.kind())
}

fn bytes(n: u64) -> Vec<u8> {
    chunk_bytes(&chunk_address(0, n), 100)
}

#[test]
fn without_faults_it_is_the_store_within() {
    struct Fixture;
    impl crate::store::StoreFixture for Fixture {
        fn open(&self) -> Result<Box<dyn BlockStore>, StoreError> {
            let within = MemoryStore::new(64 << 20);
            Ok(Box::new(FaultStore::new(within, FaultSchedule::seeded(1, 0, &Fault::ALL))))
        }
        fn keeps(&self) -> bool {
            false
        }
    }
    crate::store::check_store(&Fixture);
}

#[test]
fn a_read_is_cut_flipped_emptied_or_lost() {
    let store = store(&[Some(Fault::Cut), Some(Fault::Flip), Some(Fault::Empty), None]);
    let cut = read(&store, 1).unwrap().unwrap();
    assert!(cut.len() < 100 && bytes(1).starts_with(&cut), "{cut:?}");
    let flipped = read(&store, 1).unwrap().unwrap();
    let bits = flipped.iter().zip(bytes(1)).map(|(a, b)| (a ^ b).count_ones());
    assert_eq!((flipped.len(), bits.sum::<u32>()), (100, 1));
    assert_eq!(read(&store, 1), Ok(Some(vec![])));
    assert_eq!(read(&store, 1), Ok(Some(bytes(1))), "what is kept is unharmed");
    store.set_schedule(FaultSchedule::listed(&[Some(Fault::Lose)]));
    assert_eq!((read(&store, 1), read(&store, 1)), (Ok(None), Ok(None)));
    assert_eq!(read(&store, 2), Ok(Some(bytes(2))));
    let counts = store.counts();
    assert_eq!([Fault::Cut, Fault::Flip, Fault::Empty, Fault::Lose].map(|f| counts[&f]), [1; 4]);
}

#[test]
fn a_read_answers_another_question() {
    let store = store(&[Some(Fault::Swap), None, Some(Fault::Repeat)]);
    assert_eq!(read(&store, 1), Ok(Some(bytes(2))));
    assert_eq!(read(&store, 1), Ok(Some(bytes(1))));
    assert_eq!(read(&store, 2), Ok(Some(bytes(1))));
    assert_eq!(read(&store, 2), Ok(Some(bytes(2))));
    store.set_schedule(FaultSchedule::listed(&[None, Some(Fault::Repeat)]));
    let [one, none] = [1, 3].map(|n| chunk_address(0, n));
    assert_eq!(store.contains(&[one], soon()).unwrap(), [true]);
    assert_eq!(store.contains(&[none], soon()).unwrap(), [true]);
    assert_eq!(store.contains(&[none], soon()).unwrap(), [false]);
    assert_eq!(store.counts()[&Fault::Repeat], 2);
}

#[test]
fn a_write_keeps_something_else() {
    let faults = [Fault::Cut, Fault::Flip, Fault::Swap, Fault::Forget].map(Some);
    let store = store(&faults);
    for n in 3..7 {
        let chunk = chunk_address(0, n);
        assert_eq!(store.put(&chunk, &bytes(n), soon()).unwrap(), Put::New);
    }
    let cut = read(&store, 3).unwrap().unwrap_or_default();
    assert!(cut.len() < 100 && bytes(3).starts_with(&cut));
    let flipped = read(&store, 4).unwrap().unwrap();
    let bits = flipped.iter().zip(bytes(4)).map(|(a, b)| (a ^ b).count_ones());
    assert_eq!(bits.sum::<u32>(), 1);
    let swapped = read(&store, 5).unwrap().unwrap();
    assert!([bytes(1), bytes(2), cut, flipped].contains(&swapped));
    assert_eq!(read(&store, 6), Ok(None));
    store.set_schedule(FaultSchedule::listed(&[Some(Fault::Forget)]));
    store.remove(&[chunk_address(0, 1)], soon()).unwrap();
    assert_eq!(read(&store, 1), Ok(Some(bytes(1))));
}

#[test]
fn a_call_fails_or_comes_late() {
    let kinds = [
        StoreErrorKind::Unavailable,
        StoreErrorKind::Timeout,
        StoreErrorKind::Full,
        StoreErrorKind::Denied,
        StoreErrorKind::Other,
    ];
    let store = store(&kinds.map(|kind| Some(Fault::Fail(kind))));
    for kind in kinds {
        assert_eq!(read(&store, 1), Err(kind));
    }
    let delay = Fault::Delay(Duration::from_millis(5));
    store.set_schedule(FaultSchedule::listed(&[Some(delay); 3]));
    let begin = Instant::now();
    assert_eq!(read(&store, 1), Ok(Some(bytes(1))));
    assert!(begin.elapsed() >= Duration::from_millis(5));
    let new = chunk_address(0, 9);
    let late = store.put(&new, &bytes(9), Instant::now() + Duration::from_millis(1));
    assert_eq!(late.unwrap_err().kind(), StoreErrorKind::Timeout);
    assert_eq!(store.contains(&[new], soon()).unwrap(), [true], "done, but late");
    assert_eq!(store.counts()[&delay], 3);
}

#[test]
fn a_seed_gives_the_same_faults_again() {
    let outcomes = |seed| {
        let store = store(&[]);
        store.set_schedule(FaultSchedule::seeded(seed, 3, &Fault::ALL));
        let reads: Vec<_> = (0..300).map(|n| read(&store, 1 + n % 2)).collect();
        (reads, store.counts())
    };
    let (reads, counts) = outcomes(7);
    assert_eq!((reads.clone(), counts.clone()), outcomes(7));
    assert_ne!(reads, outcomes(8).0);
    let number: u64 = counts.values().sum();
    assert!((30..150).contains(&number), "{counts:?}");
}
