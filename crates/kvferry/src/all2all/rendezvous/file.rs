//! `file:///path`: a directory with one file per value.
//!
//! Every file says who wrote it: boot, PID namespace, process id and start time, and a random number of the handle.
//! A file whose writer is known to be gone counts as absent. All changes happen under a lock on the directory, which the
//! system releases when its holder dies.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvferry_host::{Credentials, ForkGuard, random_bytes};

use super::{MAX_VALUE, Rendezvous, check, timed_out};
use crate::all2all::setup::SetupError;
use crate::all2all::wire::left;

const MAGIC: &[u8] = b"kvferry rendezvous 1\n";
/// Most bytes of a writer's line.
const MAX_WRITER: usize = 256;
/// Most bytes of a file name that all usual file systems take.
const MAX_FILE_NAME: usize = 255;
const SUFFIX: &str = ".kvr";
/// Marks a directory that a handle made, and the last one removes.
const MADE: &str = "made-by-kvferry";
const FIRST_NAP: Duration = Duration::from_millis(1);
const LONGEST_NAP: Duration = Duration::from_millis(20);

/// A process, told apart from any other that has or had its number.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Writer {
    boot: String,
    namespace: String,
    pid: u32,
    /// Clock ticks between boot and its start.
    started: u64,
    /// Of the handle: one process may have several.
    nonce: String,
}

impl Writer {
    fn own() -> Result<Writer, SetupError> {
        let nonce: [u8; 16] = random_bytes().map_err(SetupError::io("random bytes"))?;
        let pid = std::process::id();
        Ok(Writer {
            // Where /proc hides these, writers cannot be told apart by them, and count as alive.
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .map_or_else(|_| "-".to_owned(), |id| id.trim().to_owned()),
            namespace: fs::read_link("/proc/self/ns/pid")
                .map_or_else(|_| "-".to_owned(), |link| link.to_string_lossy().replace(' ', "_")),
            pid,
            started: start_time(pid).unwrap_or(0),
            nonce: nonce.iter().map(|byte| format!("{byte:02x}")).collect(),
        })
    }

    fn line(&self) -> String {
        format!("{} {} {} {} {}\n", self.boot, self.namespace, self.pid, self.started, self.nonce)
    }

    fn parse(line: &str) -> Option<Writer> {
        let mut fields = line.split(' ');
        let mut next = || fields.next().map(str::to_owned);
        Some(Writer {
            boot: next()?,
            namespace: next()?,
            pid: next()?.parse().ok()?,
            started: next()?.parse().ok()?,
            nonce: next()?,
        })
    }

    /// Whether the writer is certainly gone, seen from `own`.
    fn is_gone(&self, own: &Writer) -> bool {
        if self.boot != own.boot {
            return true;
        }
        if self.namespace != own.namespace || own.namespace == "-" || self.started == 0 {
            return false;
        }
        start_time(self.pid) != Some(self.started)
    }
}

/// When a process started, in clock ticks since boot; `None` if there is none with this number, or it is a zombie.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, so count from the last one.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// A handle; its files go with it.
#[derive(Debug)]
pub(super) struct FileStore {
    dir: PathBuf,
    own: Writer,
    fork: ForkGuard,
}

impl FileStore {
    pub(super) fn open(dir: &Path) -> Result<FileStore, SetupError> {
        let store = FileStore { dir: dir.to_owned(), own: Writer::own()?, fork: ForkGuard::new() };
        // Fails here rather than at the first value if the path cannot be used.
        drop(store.lock()?);
        Ok(store)
    }

    fn io(&self, doing: &str) -> impl FnOnce(io::Error) -> SetupError {
        SetupError::place(format!("file://{}", self.dir.display()), doing)
    }

    /// Locks the directory, making it if it is not there. Released when the file is closed.
    fn lock(&self) -> Result<File, SetupError> {
        let mut made = false;
        loop {
            match fs::DirBuilder::new().mode(0o700).create(&self.dir) {
                Ok(()) => made = true,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(self.io("making the directory, whose parent must exist")(error));
                }
                Err(error) => return Err(self.io("making the directory")(error)),
            }
            let held = match File::open(&self.dir) {
                Ok(held) => held,
                // Removed by the last of an earlier run, just now.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(self.io("opening the directory")(error)),
            };
            held.lock().map_err(self.io("locking the directory"))?;
            let locked = held.metadata().map_err(self.io("looking at the directory"))?;
            if !locked.is_dir() {
                let error = io::Error::from(io::ErrorKind::NotADirectory);
                return Err(self.io("using it as a directory")(error));
            }
            // While this waited for the lock the directory may have been removed, and perhaps made anew.
            match fs::metadata(&self.dir) {
                Ok(there) if (there.dev(), there.ino()) == (locked.dev(), locked.ino()) => {
                    if made {
                        File::create(self.dir.join(MADE)).map_err(self.io("marking the directory"))?;
                    }
                    return Ok(held);
                }
                _ => {}
            }
        }
    }

    fn path(&self, key: &str) -> Result<PathBuf, SetupError> {
        let mut name = String::new();
        for &byte in key.as_bytes() {
            if byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_' {
                name.push(char::from(byte));
            } else {
                name.push_str(&format!("%{byte:02x}"));
            }
        }
        name.push_str(SUFFIX);
        if name.len() > MAX_FILE_NAME {
            let what = "the file name of a rendezvous key".to_owned();
            return Err(SetupError::TooLarge { what, value: name.len(), limit: MAX_FILE_NAME });
        }
        Ok(self.dir.join(name))
    }

    fn look(&self, path: &Path) -> Option<Vec<u8>> {
        let (writer, value) = read(path)?;
        (!writer.is_gone(&self.own)).then_some(value)
    }

    /// Removes this handle's files and those of writers that are gone; the directory too if nothing is left and a handle
    /// made it.
    fn clean(&self) -> Result<(), SetupError> {
        if !self.dir.exists() {
            return Ok(());
        }
        let _held = self.lock()?;
        let mut others = false;
        for entry in fs::read_dir(&self.dir).map_err(self.io("reading the directory"))?.flatten() {
            let path = entry.path();
            if entry.file_name() == MADE {
                continue;
            }
            let ours = match read(&path) {
                Some((writer, _)) => writer.nonce == self.own.nonce || writer.is_gone(&self.own),
                // Half-written: its writer holds the lock while it exists, so it died.
                None => path.extension().is_some_and(|extension| extension == "new"),
            };
            if ours {
                fs::remove_file(&path).map_err(self.io("removing a value"))?;
            } else {
                others = true;
            }
        }
        let mark = self.dir.join(MADE);
        if !others && mark.exists() {
            fs::remove_file(&mark).map_err(self.io("removing the mark"))?;
            fs::remove_dir(&self.dir).map_err(self.io("removing the directory"))?;
        }
        Ok(())
    }
}

/// Who wrote a file, and the value; `None` for anything else than a whole file of ours.
fn read(path: &Path) -> Option<(Writer, Vec<u8>)> {
    if !path.to_str()?.ends_with(SUFFIX) {
        return None;
    }
    let mut bytes = Vec::new();
    let limit = (MAGIC.len() + MAX_WRITER + MAX_VALUE) as u64;
    // A fifo or a device planted here must not block or feed us.
    let file = File::options().read(true).custom_flags(NONBLOCK).open(path).ok()?;
    let found = file.metadata().ok()?;
    if !found.is_file() || found.uid() != Credentials::own().uid {
        return None;
    }
    file.take(limit).read_to_end(&mut bytes).ok()?;
    let rest = bytes.strip_prefix(MAGIC)?;
    let end = rest.iter().take(MAX_WRITER).position(|&byte| byte == b'\n')?;
    let writer = Writer::parse(std::str::from_utf8(&rest[..end]).ok()?)?;
    Some((writer, rest[end + 1..].to_vec()))
}

/// `O_NONBLOCK` on x86-64 and aarch64 Linux.
const NONBLOCK: i32 = 0o4000;

impl Rendezvous for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), SetupError> {
        self.fork.check()?;
        check(key, value)?;
        let path = self.path(key)?;
        let new = path.with_extension("new");
        let _held = self.lock()?;
        // Left by a writer that died, or planted; never written through.
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(self.io("writing a value")(error));
            }
            _ => {}
        }
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)
            .map_err(self.io("writing a value"))?;
        let bytes = [MAGIC, self.own.line().as_bytes(), value].concat();
        file.write_all(&bytes).map_err(self.io("writing a value"))?;
        // Readers take no lock, so a value appears whole or not at all.
        fs::rename(&new, &path).map_err(self.io("writing a value"))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, SetupError> {
        self.fork.check()?;
        check(key, &[])?;
        let path = self.path(key)?;
        let start = Instant::now();
        let mut nap = FIRST_NAP;
        loop {
            if let Some(value) = self.look(&path) {
                return Ok(value);
            }
            let left = left(start, timeout);
            if left.is_zero() {
                return Err(timed_out(key, timeout, None));
            }
            std::thread::sleep(nap.min(left));
            nap = (nap * 2).min(LONGEST_NAP);
        }
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        if self.fork.check().is_ok()
            && let Err(error) = self.clean()
        {
            tracing::warn!(%error, "cannot clean up a rendezvous");
        }
    }
}
