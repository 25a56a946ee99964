//! `kv tier` on a folder with everything that may lie in one, and on Redis and servers of S3 that
//! are installed.
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kv::reuse::BlockKey;
use kv::tier::chunk::encode_header;
use kv::tier::{
    BlockStore, ChunkAddress, ChunkRoot, ChunkSpec, DiskOptions, DiskStore, Expectation, Identity,
    ModelDigest,
};
use kv::{CacheSpec, GroupId, KvFormat};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Output, fails, kv};

/// Returns the root of a model's chunks: 2 layers, blocks of 16, 2 blocks in a chunk.
fn root(weights: &str) -> ChunkRoot {
    let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(64).format(KvFormat::Bf16);
    let spec = spec.paged(16, 64).build().expect("a spec");
    let chunks = ChunkSpec::new(&spec, GroupId(0)).and_then(|chunks| chunks.with_blocks(2));
    let identity = Identity::new(ModelDigest::of_bytes(weights.as_bytes()));
    identity.root(&chunks.expect("chunks"), 7, b"", None).expect("no adapter")
}

/// Makes the first chunk of a prompt, written `age` seconds ago.
fn chunk(root: &ChunkRoot, prompt: u32, age: u64) -> (ChunkAddress, Vec<u8>) {
    let spec = root.spec();
    let tokens: Vec<u32> = (0..32).map(|at| prompt * 1_000 + at).collect();
    let name = root.chunk_name(0, &root.name(), &tokens, &[]);
    let mut bytes = vec![0; spec.chunk_bytes()];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::try_from(at * 7 % 251).expect("a byte");
    }
    let says = Expectation {
        root,
        index: 0,
        parent: root.name(),
        name,
        last_key: BlockKey(1),
        tokens: &tokens,
        contents: &[],
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    encode_header(&mut bytes, &says, now - age).expect("a header");
    (ChunkAddress { root: root.name(), name }, bytes)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().expect("a folder"))
    }

    fn path(&self) -> &str {
        self.0.path().to_str().expect("UTF-8")
    }

    fn file(&self, chunk: &ChunkAddress) -> PathBuf {
        let (root, name) = (chunk.root.to_string(), chunk.name.to_string());
        self.0.path().join(root).join(&name[..2]).join(&name[2..4]).join(name)
    }

    /// Writes chunks as a cache does.
    fn put(&self, chunks: &[(ChunkAddress, Vec<u8>)]) {
        let store = DiskStore::open(self.0.path(), DiskOptions::new(64 << 20).with_floor(0));
        let store = store.expect("a store");
        for (address, bytes) in chunks {
            store.put(address, bytes, soon()).expect("a write");
        }
    }

    /// Changes the file of a chunk.
    fn damage(&self, chunk: &ChunkAddress, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.file(chunk)).expect("a file");
        change(&mut bytes);
        fs::write(self.file(chunk), bytes).expect("a file");
    }
}

/// Runs with `--json` and returns the exit code and the objects, one a line.
fn objects(args: &[&str]) -> (i32, Vec<Value>) {
    let Output { code, stdout, .. } = kv(&[&["tier"], args, &["--json"]].concat());
    let objects = stdout.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    (code, objects.collect())
}

fn object(args: &[&str]) -> (i32, Value) {
    let (code, objects) = objects(args);
    assert_eq!(objects.len(), 1, "{args:?}: {objects:?}");
    (code, objects[0].clone())
}

/// Returns a field of each element of a list.
fn texts(list: &Value, field: &str) -> Vec<String> {
    let list = list.as_array().expect("a list").iter();
    let mut texts: Vec<_> =
        list.map(|value| value[field].as_str().expect("text").to_owned()).collect();
    texts.sort();
    texts
}

/// Writes good chunks of two models, and one chunk of every other kind; returns the names of the
/// broken chunks, each with words of the reason, and the name of the newer one.
fn everything(folder: &Folder) -> (Vec<(String, &'static str)>, String) {
    let (a, b) = (root("a"), root("b"));
    let good = [chunk(&a, 1, 10), chunk(&a, 2, 7_200), chunk(&b, 3, 864_000)];
    let others: Vec<_> = (10..18).map(|prompt| chunk(&a, prompt, 20)).collect();
    folder.put(&good);
    folder.put(&others);
    let [payload, header, cut, empty, swapped, newer, text, long] = &others[..] else {
        panic!("eight chunks")
    };
    folder.damage(&payload.0, |bytes| bytes[9_000] ^= 1);
    folder.damage(&header.0, |bytes| bytes[330] ^= 1);
    folder.damage(&cut.0, |bytes| bytes.truncate(9_000));
    folder.damage(&empty.0, Vec::clear);
    folder.damage(&swapped.0, |bytes| bytes.clone_from(&good[0].1));
    folder.damage(&newer.0, |bytes| bytes[8] = 9);
    folder.damage(&text.0, |bytes| *bytes = "not a chunk ".repeat(1_000).into_bytes());
    folder.damage(&long.0, |bytes| bytes.push(0));
    fs::write(folder.0.path().join("notes.txt"), "mine").expect("a file");
    let mut broken: Vec<_> = [
        (payload, "payload with CRC"),
        (header, "header with CRC"),
        (cut, "bytes, expected"),
        (empty, "empty"),
        (swapped, ", expected"),
        (text, "is no chunk"),
        (long, "bytes, expected"),
    ]
    .map(|(chunk, words)| (chunk.0.name.to_string(), words))
    .to_vec();
    broken.sort();
    (broken, newer.0.name.to_string())
}

#[test]
fn broken_chunks_are_found_and_removed() {
    let folder = Folder::new();
    let (broken, newer) = everything(&folder);
    let (code, report) = object(&["verify", folder.path()]);
    assert_eq!((code, &report["good"], &report["removed"]), (1, &3.into(), &false.into()));
    let names: Vec<_> = broken.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(texts(&report["broken"], "name"), names);
    for finding in report["broken"].as_array().expect("a list") {
        let words = broken.iter().find(|(name, _)| finding["name"] == name.as_str());
        let (_, words) = words.expect("a broken one");
        assert!(finding["why"].as_str().expect("text").contains(words), "{words}: {finding}");
    }
    assert_eq!(texts(&report["foreign"], "name"), [newer.as_str()]);
    assert_eq!(report["others"], serde_json::json!(["notes.txt"]));

    let text = kv(&["tier", "verify", folder.path()]);
    assert_eq!(text.stdout.lines().filter(|line| line.starts_with("broken: ")).count(), 7);
    assert!(text.stdout.contains("other: notes.txt\n3 good chunks, "), "{}", text.stdout);
    assert_eq!(text.stderr, "kv: 7 chunks are broken; --remove removes them\n");

    let (code, report) = object(&["verify", folder.path(), "--remove"]);
    assert_eq!((code, &report["removed"]), (1, &true.into()));
    let (code, report) = object(&["verify", folder.path()]);
    assert_eq!((code, &report["good"]), (0, &3.into()));
    assert_eq!(
        (texts(&report["foreign"], "name"), &report["broken"]),
        (vec![newer], &Value::Array(vec![]))
    );
    assert!(folder.0.path().join("notes.txt").exists());
}

#[test]
fn chunks_are_listed_with_their_headers() {
    let folder = Folder::new();
    let (broken, newer) = everything(&folder);
    let (code, lines) = objects(&["ls", folder.path()]);
    assert_eq!((code, lines.len()), (0, 12));
    let a = root("a");
    let (first, _) = chunk(&a, 1, 10);
    let line = |name: &str| {
        let line = lines.iter().find(|line| line["name"] == name);
        line.unwrap_or_else(|| panic!("{name} is not listed"))
    };
    let good = line(&first.name.to_string());
    assert_eq!(good["root"], a.name().to_string());
    assert_eq!(good["model"], a.model().to_string());
    let roles = [("key", 0), ("value", 1)];
    for (role, at) in roles {
        let plane = &good["planes"][at];
        assert_eq!((&plane["role"], &plane["format"]), (&role.into(), &"bf16".into()));
        assert_eq!(plane["shape"], serde_json::json!([64]));
    }
    let numbers = ["group", "layers", "kv_heads", "block_size", "blocks", "tokens"];
    assert_eq!(numbers.map(|field| good[field].as_u64()), [0, 2, 2, 16, 2, 32].map(Some));
    assert_eq!(good["bytes"].as_u64(), u64::try_from(a.spec().chunk_bytes()).ok());
    assert!((10..60).contains(&good["age_s"].as_u64().expect("a number")), "{good}");
    // A header says nothing about the payload, nor about the name of the file.
    let unread = |why: &str| !["payload with CRC", ", expected", "bytes, expected"].contains(&why);
    for (name, words) in broken.iter().filter(|(_, why)| unread(why)) {
        let why = line(name)["refused"].as_str().expect("a reason");
        assert!(why.contains(words) && line(name)["model"].is_null(), "{why}");
    }
    assert!(line(&newer)["refused"].as_str().expect("a reason").contains("version 9"));

    let text = kv(&["tier", "ls", folder.path()]).stdout;
    assert_eq!(text.lines().count(), 13, "{text}");
    let shown = text.lines().find(|line| line.starts_with(&first.name.to_string()[..16]));
    let shown: Vec<_> = shown.expect("its line").split_whitespace().collect();
    assert_eq!(shown[3..7], ["0", "bf16", "32", "0..2"]);
    let b = root("b").name().to_string();
    let (_, lines) = objects(&["ls", folder.path(), "--root", &b[..16]]);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert_eq!(lines[0]["root"], b);
}

#[test]
fn roots_are_counted() {
    let folder = Folder::new();
    everything(&folder);
    let (code, report) = object(&["stat", folder.path()]);
    assert_eq!((code, &report["chunks"], &report["others"]), (0, &11.into(), &1.into()));
    let mut expected = [root("a"), root("b")].map(|root| root.name().to_string());
    expected.sort();
    assert_eq!(texts(&report["roots"], "root"), expected);
    for line in report["roots"].as_array().expect("a list") {
        let is_b = line["root"] == root("b").name().to_string();
        assert_eq!(line["chunks"], if is_b { 1 } else { 10 });
    }
    let text = kv(&["tier", "stat", folder.path()]).stdout;
    let last = text.lines().last().expect("a line");
    assert!(
        last.contains(": 11 chunks of 2 roots, ")
            && last.ends_with("1 entry under no name of a chunk"),
        "{text}"
    );
}

/// Returns the number of good chunks.
fn good(place: &str) -> Value {
    object(&["verify", place]).1["good"].clone()
}

#[test]
fn chunks_are_removed_by_root_and_age() {
    let folder = Folder::new();
    let (a, b) = (root("a"), root("b"));
    folder.put(&[chunk(&a, 1, 10), chunk(&a, 2, 7_200), chunk(&b, 3, 864_000), chunk(&b, 4, 10)]);
    let place = folder.path();
    fails(&["tier", "rm", place, "--all"], 1, "nothing is removed without --yes: 4 chunks, ");
    assert_eq!(good(place), 4);
    let (code, report) = object(&["rm", place, "--older-than", "1h"]);
    assert_eq!((code, &report["chunks"], &report["removed"]), (1, &2.into(), &false.into()));
    let b = b.name().to_string();
    let (code, report) = object(&["rm", place, "--older-than", "1h", "--root", &b, "--yes"]);
    assert_eq!((code, &report["chunks"], &report["removed"]), (0, &1.into(), &true.into()));
    assert_eq!(good(place), 3);
    let removed = kv(&["tier", "rm", place, "--older-than", "90m", "--yes"]);
    assert_eq!(removed.code, 0);
    assert!(removed.stdout.starts_with("removed: 1 chunk, "), "{}", removed.stdout);
    let other = format!("{}{}", &b[..32], "0".repeat(32));
    assert_eq!(object(&["rm", place, "--root", &other, "--yes"]).1["chunks"], 0);
    assert_eq!(object(&["rm", place, "--root", &b[..20], "--yes"]).1["chunks"], 1);
    assert!(!Path::new(place).join(&b).exists(), "an empty folder");
    assert_eq!(object(&["rm", place, "--all", "--yes"]).1["chunks"], 1);
    let nothing = kv(&["tier", "rm", place, "--all"]);
    assert_eq!((nothing.code, nothing.stdout.as_str()), (0, "there is nothing to remove\n"));
    // What a cache writes next is counted from nothing.
    folder.put(&[chunk(&a, 1, 10)]);
    assert_eq!(good(place), 1);
}

#[test]
fn only_a_folder_of_chunks_is_touched() {
    let folder = TempDir::new().expect("a folder");
    let place = folder.path().join("cache");
    let place = place.to_str().expect("UTF-8");
    for command in [&["ls"][..], &["stat"], &["verify", "--remove"], &["rm", "--all", "--yes"]] {
        let args = [&["tier", command[0], place], &command[1..]].concat();
        fails(&args, 1, "No such file");
    }
    fs::create_dir(place).expect("a folder");
    fs::write(Path::new(place).join("notes.txt"), "mine").expect("a file");
    fails(&["tier", "rm", place, "--all", "--yes"], 1, "not a folder of kv-tier");
    let entries = fs::read_dir(place).expect("a folder").count();
    assert_eq!(entries, 1, "something was made");
    fails(&["tier", "ls", "redis://127.0.0.1:1"], 1, "cannot be reached");
}

#[cfg(feature = "redis")]
#[test]
fn redis_is_listed_checked_and_cleaned() {
    use kv::tier::redis::RedisStore;
    use kv_testkit::servers::{Server, ServerKind};

    if let Err(why) = ServerKind::Redis.find() {
        println!("skipped: {why}");
        return;
    }
    let server = Server::start(ServerKind::Redis, &[]).expect("a server");
    let url = format!("redis://{}?prefix=llama:", server.address());
    let store = RedisStore::from_url(&url).expect("a URL");
    let a = root("a");
    let chunks = [1, 2, 3, 4, 5].map(|prompt| chunk(&a, prompt, 7_200));
    let [(first, good_bytes), second, (flipped, bytes), (cut, _), (empty, _)] = &chunks;
    store.put(first, good_bytes, soon()).expect("a write");
    store.put(&second.0, &second.1, soon()).expect("a write");
    let mut bytes = bytes.clone();
    bytes[9_000] ^= 1;
    store.put(flipped, &bytes, soon()).expect("a write");
    store.put(cut, &bytes[..9_000], soon()).expect("a write");
    let key =
        |chunk: &ChunkAddress| format!("llama:v1/{}/{}", &chunk.root.to_string()[..16], chunk.name);
    assert_eq!(server.redis(&format!("SET {} \"\"", key(empty))), "+OK");
    server.redis("SET llama:v1/notes mine");
    server.redis("SET other mine");

    let (code, report) = object(&["verify", &url]);
    assert_eq!((code, &report["good"]), (1, &2.into()));
    assert_eq!(report["others"], serde_json::json!(["llama:v1/notes"]));
    let mut broken = [flipped, cut, empty].map(|chunk| chunk.name.to_string());
    broken.sort();
    assert_eq!(texts(&report["broken"], "name"), broken);
    let (_, report) = object(&["stat", &url]);
    assert_eq!(report["roots"][0]["root"], a.name().to_string());
    assert_eq!(report["roots"][0]["chunks"], 5);
    object(&["verify", &url, "--remove"]);
    let (code, lines) = objects(&["ls", &url, "--root", &a.name().to_string()]);
    assert_eq!((code, lines.len()), (0, 2));
    assert!(lines.iter().all(|line| line["root"] == a.name().to_string()), "{lines:?}");
    assert_eq!(object(&["rm", &url, "--older-than", "1h", "--yes"]).1["chunks"], 2);
    assert_eq!(server.redis("DBSIZE"), ":2", "what is no chunk stays");
}

/// Runs `kv tier` on a server with credentials, with `--json`; returns exit code and objects.
#[cfg(feature = "object")]
fn signed(args: &[&str]) -> (i32, Vec<Value>) {
    let mut command = crate::support::command(&[&["tier"], args, &["--json"]].concat());
    command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret");
    let output = command.output().expect("the program starts");
    let lines = String::from_utf8(output.stdout).expect("UTF-8");
    let objects = lines.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    (output.status.code().expect("no signal"), objects.collect())
}

/// Lists, counts, checks and removes `count` chunks of two roots: more than a page of a listing if
/// there are more than 1,000.
#[cfg(feature = "object")]
fn list_check_and_clean(kind: kv_testkit::servers::ServerKind, count: u32) {
    use kv::tier::object::ObjectStore;
    use kv_testkit::servers::{BUCKET, Server};

    let server = Server::start(kind, &[]).expect("a server");
    let url = format!(
        "s3://{BUCKET}/llama?endpoint=http://{}&allow_http=true&region=eu-west-1",
        server.address()
    );
    let keys = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    let keys = keys.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let store = ObjectStore::with_variables(&url, keys).expect("a URL");
    let (a, b) = (root("a"), root("b"));
    let mut names = Vec::new();
    for prompt in 0..count {
        // Every fifth is of `b`, every tenth old.
        let root = if prompt % 5 == 0 { &b } else { &a };
        let (address, mut bytes) = chunk(root, prompt, if prompt % 10 == 1 { 7_200 } else { 10 });
        match prompt {
            7 => bytes[9_000] ^= 1,
            8 => bytes.truncate(9_000),
            _ => {}
        }
        store.put(&address, &bytes, soon()).expect("a write");
        names.push(address.name.to_string());
    }
    let mut broken = vec![names[7].clone(), names[8].clone()];
    broken.sort();
    names.sort();

    let (code, lines) = signed(&["ls", &url]);
    let mut listed: Vec<_> =
        lines.iter().map(|line| line["name"].as_str().expect("text").to_owned()).collect();
    listed.sort();
    assert_eq!((code, listed), (0, names));
    assert!(lines.iter().all(|line| line["tokens"] == 32), "{lines:?}");
    let b_name = b.name().to_string();
    let (_, lines) = signed(&["ls", &url, "--root", &b_name]);
    assert_eq!(u32::try_from(lines.len()).ok(), Some(count.div_ceil(5)));

    let (code, report) = signed(&["stat", &url]);
    assert_eq!((code, &report[0]["chunks"]), (0, &count.into()));
    let of_b = report[0]["roots"].as_array().expect("a list").iter();
    let of_b = of_b.clone().find(|root| root["root"] == b_name.as_str()).expect("a root");
    assert_eq!(of_b["chunks"], count.div_ceil(5));

    let (code, report) = signed(&["verify", &url, "--remove"]);
    assert_eq!((code, &report[0]["good"]), (1, &(count - 2).into()));
    assert_eq!(texts(&report[0]["broken"], "name"), broken);
    let (code, report) = signed(&["verify", &url]);
    assert_eq!((code, &report[0]["good"]), (0, &(count - 2).into()));

    let old = (count + 8) / 10;
    let (code, report) = signed(&["rm", &url, "--older-than", "1h"]);
    assert_eq!(
        (code, &report[0]["chunks"], &report[0]["removed"]),
        (1, &old.into(), &false.into())
    );
    let (code, report) = signed(&["rm", &url, "--older-than", "1h", "--yes"]);
    assert_eq!((code, &report[0]["chunks"]), (0, &old.into()));
    let (code, report) = signed(&["rm", &url, "--root", &b_name[..16], "--yes"]);
    assert_eq!((code, &report[0]["chunks"]), (0, &count.div_ceil(5).into()));
    let rest = count - 2 - old - count.div_ceil(5);
    let (code, report) = signed(&["rm", &url, "--all", "--yes"]);
    assert_eq!((code, &report[0]["chunks"]), (0, &rest.into()));
    assert_eq!(signed(&["stat", &url]).1[0]["chunks"], 0);
}

#[cfg(feature = "object")]
#[test]
fn s3_is_listed_checked_and_cleaned_over_several_pages() {
    use kv_testkit::servers::ServerKind;

    match ServerKind::SeaweedFs.find() {
        Ok(_) => list_check_and_clean(ServerKind::SeaweedFs, 1_102),
        Err(why) => println!("skipped: {why}"),
    }
}

#[cfg(feature = "object")]
#[test]
fn imitated_s3_is_listed_checked_and_cleaned() {
    use kv_testkit::servers::ServerKind;

    match ServerKind::Moto.find() {
        Ok(_) => list_check_and_clean(ServerKind::Moto, 42),
        Err(why) => println!("skipped: {why}"),
    }
}
