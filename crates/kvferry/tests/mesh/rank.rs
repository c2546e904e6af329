//! A rank in a process of its own: this test program again, told by its environment what to do.
//!
//! The script is a list of words separated by spaces; each one prints a line that begins with `@`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kvferry::all2all::internals::{Event, Mesh, Notice, Watch};
use kvferry::all2all::{Rendezvous, SetupError, rendezvous};
use kvferry::host::{PeerSocket, Received};

use crate::footprint::PATIENCE;
use crate::stores::{card, hello};

/// A rank's process; killed on drop.
pub(crate) struct Rank {
    pub(crate) child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
    reader: Option<std::thread::JoinHandle<()>>,
    forked: Vec<i32>,
}

/// How a rank is started.
#[derive(Clone)]
pub(crate) struct Job<'a> {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) url: &'a str,
    pub(crate) name: &'a str,
    pub(crate) timeout: Duration,
    pub(crate) script: &'a str,
}

impl Rank {
    pub(crate) fn start(job: &Job<'_>) -> Rank {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["rank::entry", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env("KVF_RANK", job.rank.to_string())
            .env("KVF_WORLD", job.world.to_string())
            .env("KVF_URL", job.url)
            .env("KVF_NAME", job.name)
            .env("KVF_TIMEOUT_MS", job.timeout.as_millis().to_string())
            .env("KVF_SCRIPT", job.script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let input = child.stdin.take().unwrap();
        let (sender, lines) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The harness writes in front of the first line.
                if let Some(at) = line.find('@')
                    && sender.send(line[at + 1..].to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Rank { child, input, lines, reader: Some(reader), forked: Vec::new() }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line; a fork's is remembered for the end.
    pub(crate) fn line(&mut self) -> String {
        let line = self.lines.recv_timeout(PATIENCE).expect("the rank said nothing");
        if let Some(pid) = line.strip_prefix("forked ") {
            self.forked.push(pid.parse().unwrap());
        }
        line
    }

    /// Asserts the next line's beginning.
    pub(crate) fn says(&mut self, expected: &str) -> String {
        let line = self.line();
        assert!(line.starts_with(expected), "expected {expected:?}, got {line:?}");
        line
    }

    /// Asserts the beginning of the next line that is no event.
    pub(crate) fn answers(&mut self, expected: &str) -> String {
        loop {
            let line = self.line();
            if !line.starts_with("event") {
                assert!(line.starts_with(expected), "expected {expected:?}, got {line:?}");
                return line;
            }
        }
    }

    /// Lets a script that waits at `await` go on.
    pub(crate) fn go(&mut self) {
        writeln!(self.input, "go").unwrap();
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: our own child, not reaped yet, so the number is its.
        assert_eq!(unsafe { libc::kill(self.pid() as i32, signal) }, 0);
    }

    /// Waits for its end.
    pub(crate) fn ended(mut self) {
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < PATIENCE, "the rank does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for &pid in &self.forked {
            // SAFETY: forked by our child to sleep for longer than any test; nobody else ends it.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        // Its output ends when everybody who holds it has ended.
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
    }
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

fn say(text: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@{text}").unwrap();
    out.flush().unwrap();
}

/// A store that ends the process at its n-th call (counted from 0), before or after the call.
struct Deadly {
    inner: Arc<dyn Rendezvous>,
    calls: AtomicUsize,
    at: usize,
    after: bool,
}

impl Deadly {
    fn call<T>(&self, call: impl FnOnce(&dyn Rendezvous) -> T) -> T {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        if number == self.at && !self.after {
            std::process::exit(0);
        }
        let result = call(&*self.inner);
        if number == self.at && self.after {
            std::process::exit(0);
        }
        result
    }
}

impl Rendezvous for Deadly {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), SetupError> {
        self.call(|store| store.set(key, value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, SetupError> {
        self.call(|store| store.get(key, timeout))
    }
}

/// Runs the script. Not a test: does nothing unless told so.
#[test]
#[ignore = "the other tests run it in processes of its own"]
fn entry() {
    if std::env::var_os("KVF_SCRIPT").is_none() {
        return;
    }
    let number = |name| variable(name).parse::<usize>().unwrap();
    let (rank, world) = (number("KVF_RANK"), number("KVF_WORLD"));
    let timeout = Duration::from_millis(number("KVF_TIMEOUT_MS") as u64);
    let (url, name, script) = (variable("KVF_URL"), variable("KVF_NAME"), variable("KVF_SCRIPT"));
    let mut store: Option<Arc<dyn Rendezvous>> = None;
    let mut meshes: Vec<Arc<Mesh>> = Vec::new();
    let mut watches = Vec::new();
    let seen: Arc<Mutex<Vec<Event>>> = Arc::default();
    for word in script.split_whitespace() {
        let (verb, argument) = word.split_once(':').unwrap_or((word, ""));
        if meshes.is_empty() && ["watch", "gather", "tell-bye"].contains(&verb) {
            // The join that failed has been told.
            continue;
        }
        let report = |result: Result<String, SetupError>| match result {
            Ok(text) => say(format!("{verb} {text}")),
            Err(error) => say(format!("{verb} failed {error:?} | {error}")),
        };
        match verb {
            "open" => match rendezvous(&url, rank, world, timeout) {
                Ok(opened) => {
                    store = Some(opened);
                    report(Ok("ok".to_owned()));
                }
                Err(error) => return report(Err(error)),
            },
            "die-before" | "die-after" => {
                let (inner, at) = (store.take().unwrap(), argument.parse().unwrap());
                store = Some(Arc::new(Deadly {
                    inner,
                    calls: AtomicUsize::new(0),
                    at,
                    after: verb == "die-after",
                }));
            }
            // Killed by itself at any point of what follows.
            "die-in" => {
                let delay = Duration::from_micros(argument.parse().unwrap());
                std::thread::spawn(move || {
                    std::thread::sleep(delay);
                    // SAFETY: sends a signal to this process, which ends it.
                    unsafe { libc::raise(libc::SIGKILL) };
                });
            }
            "join" => {
                let name = if argument.is_empty() { name.clone() } else { argument.to_owned() };
                let joined = Mesh::join(rank, world, &**store.as_ref().unwrap(), &name, timeout);
                report(joined.map(|mesh| {
                    let text = format!("ok {:016x}", mesh.nonce());
                    meshes.push(mesh);
                    text
                }));
            }
            "close-store" => store = None,
            "watch" => {
                let seen = Arc::clone(&seen);
                let watch = Watch::start(meshes.last().unwrap(), move |event| {
                    seen.lock().unwrap().push(event);
                    say(format!("event {event:?}"));
                });
                watches.push(watch.unwrap());
            }
            "gather" => {
                let mesh = meshes.last().unwrap();
                let mine = format!("{argument}-of-{rank}");
                report(mesh.gather(argument, mine.as_bytes(), timeout).map(|parts| {
                    let parts: Vec<_> =
                        parts.iter().map(|part| String::from_utf8_lossy(part).into_owned()).collect();
                    parts.join(",")
                }));
            }
            "tell-bye" => meshes.last().unwrap().tell(Notice::Bye),
            "drop" => {
                watches.clear();
                meshes.clear();
                report(Ok("ok".to_owned()));
            }
            // As the C library forks, or behind its back: then nothing closes our sockets in the child.
            "fork" | "fork-raw" => {
                let pid = if verb == "fork" {
                    // SAFETY: the child only sleeps.
                    unsafe { libc::fork() }
                } else {
                    // SAFETY: as above; without a stack the call is a fork, and the other arguments are unused.
                    unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32 }
                };
                assert!(pid >= 0);
                if pid == 0 {
                    // SAFETY: no handler; ends a child that is forgotten.
                    unsafe { libc::alarm(60) };
                    loop {
                        std::thread::sleep(Duration::from_secs(100));
                    }
                }
                say(format!("forked {pid}"));
            }
            "become" => {
                // SAFETY: no pointers.
                assert_eq!(unsafe { libc::setuid(argument.parse().unwrap()) }, 0);
            }
            // Greets rank 0 with its right token, past the checks of a rank.
            "knock" => {
                let (token, address) = card(store.as_ref().unwrap(), &name, 0);
                let socket = PeerSocket::connect(&address, timeout).unwrap();
                // The answer may be there before the greeting.
                let _ = socket.try_send(&hello(rank as u32, world as u32, 0, token, &name), &[]);
                match socket.recv(Some(timeout)).unwrap() {
                    Received::Message(bytes, _) => {
                        say(format!("knock {} {}", bytes[4], String::from_utf8_lossy(&bytes[20..])));
                    }
                    other => say(format!("knock {other:?}")),
                }
            }
            "await" => {
                say("waiting");
                let mut line = String::new();
                if std::io::stdin().read_line(&mut line).unwrap() == 0 {
                    return;
                }
            }
            "sleep" => std::thread::sleep(Duration::from_millis(argument.parse().unwrap())),
            "exit" => std::process::exit(0),
            other => panic!("unknown word {other:?}"),
        }
    }
}
