//! Words that ranks leave at the rendezvous beside their cards: that a rank will not come, and that this was read.

use std::time::{Duration, Instant};

use kvferry_layout::exchange::MAX_RANKS;

use super::attend::Attend;
use super::rendezvous::Rendezvous;
use super::setup::SetupError;

/// How often whoever leaves a word looks whether it was read.
const LOOK: Duration = Duration::from_millis(20);
/// How long a word stays for ranks that may be on their way.
const GRACE: Duration = Duration::from_millis(500);
/// How long it stays for ranks that are there.
const LINGER: Duration = Duration::from_secs(2);
/// Longest reason, in characters.
const MOST_TEXT: usize = 512;

fn refused(name: &str) -> String {
    format!("kvferry/{name}/refused")
}

fn heard(name: &str, rank: usize) -> String {
    format!("kvferry/{name}/heard/{rank}")
}

fn look(store: &dyn Rendezvous, key: &str) -> Option<Vec<u8>> {
    store.get(key, Duration::ZERO).ok()
}

/// Tells the ranks that meet under `name` that `rank` of `world` will not come, and why: their set-up then fails at once
/// with [`SetupError::Withdrawn`]. For a rank whose arguments are refused before it could join.
///
/// The word stays until all others have read it, at most two seconds if some of them are there and half a second if nobody
/// is: what it leaves behind would end the next attempt. Ranks that come later wait for this one in vain.
///
/// # Errors
/// The rendezvous failed.
pub fn refuse_to_join(
    store: &dyn Rendezvous,
    name: &str,
    rank: usize,
    world: usize,
    reason: &str,
    attend: &Attend,
) -> Result<(), SetupError> {
    let id: [u8; 8] = kvferry_host::random_bytes().map_err(SetupError::io("random bytes"))?;
    let text: String = reason.chars().take(MOST_TEXT).collect();
    let word = [&id[..], &(rank as u32).to_le_bytes(), text.as_bytes()].concat();
    store.set(&refused(name), &word)?;
    let others = || (0..world.min(MAX_RANKS)).filter(|&other| other != rank);
    let mut attending = attend.begin();
    let start = Instant::now();
    loop {
        let read = others().filter(|&other| look(store, &heard(name, other)).is_some_and(|it| it == id));
        let waiting = others().filter(|&other| look(store, &super::join::key(name, other)).is_some());
        let (read, waiting) = (read.count(), waiting.count());
        let limit = if waiting > read { LINGER } else { GRACE };
        if read == others().count() || start.elapsed() >= limit || attending.gives_up() {
            break;
        }
        std::thread::sleep(LOOK);
    }
    // Gone already where it went with its readers, or replaced by another rank's.
    if look(store, &refused(name)).is_some_and(|left| left == word) {
        store.set(&refused(name), &[0])?;
    }
    Ok(())
}

/// Fails if some rank has left word that it will not come, unless `rank` has read that before: then this is another try.
pub(super) fn heed(store: &dyn Rendezvous, name: &str, rank: usize) -> Result<(), SetupError> {
    let Some(word) = look(store, &refused(name)) else { return Ok(()) };
    let Some((id, rest)) = word.split_first_chunk::<8>() else { return Ok(()) };
    let Some((who, text)) = rest.split_first_chunk() else { return Ok(()) };
    if look(store, &heard(name, rank)).is_some_and(|it| it == *id) {
        return Ok(());
    }
    // Only spares the other a wait.
    if let Err(error) = store.set(&heard(name, rank), id) {
        tracing::debug!(%error, "could not say that a refusal was read");
    }
    Err(SetupError::Withdrawn {
        rank: u32::from_le_bytes(*who) as usize,
        what: "set-up".to_owned(),
        reason: String::from_utf8_lossy(text).into_owned(),
    })
}
