package orchestrator

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/statefile"
)

// tokenFile keeps the file join-token as the store has the token, whoever rotates it.
type tokenFile struct {
	store   *store.Store
	path    string
	changed chan struct{} // room for one

	writing sync.Mutex
	token   atomic.Pointer[join.Token] // the file follows it
}

func newTokenFile(s *store.Store, dataDir string) *tokenFile {
	return &tokenFile{store: s, path: filepath.Join(dataDir, "join-token"), changed: make(chan struct{}, 1)}
}

// write is done by one at a time, so that the last to write has read last.
func (f *tokenFile) write(ctx context.Context) (join.Token, error) {
	f.writing.Lock()
	defer f.writing.Unlock()
	token, err := f.store.Token(ctx)
	if err != nil {
		return token, err
	}
	f.token.Store(&token)
	return token, statefile.WriteBytes(f.path, []byte(token.String()+"\n"), 0o600)
}

func (f *tokenFile) current() join.Token { return *f.token.Load() }

// handleEvent is told of every batch and never waits.
func (f *tokenFile) handleEvent(b store.Batch) {
	if !b.Cluster {
		return
	}
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

func (f *tokenFile) run(ctx context.Context, log *slog.Logger) {
	for {
		select {
		case <-f.changed:
		case <-ctx.Done():
			return
		}
		for {
			once, cancel := context.WithTimeout(ctx, callTimeout)
			_, err := f.write(once)
			cancel()
			if err == nil || ctx.Err() != nil {
				break
			}
			log.Warn("the join token in the file may be an old one; trying again", "file", f.path, "error", err)
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
				return
			}
		}
	}
}

// rotate returns when no orchestrator takes the old token and the file here has the new one.
func (f *tokenFile) rotate(ctx context.Context) (join.Token, error) {
	if _, err := f.store.RotateToken(ctx); err != nil {
		return join.Token{}, err
	}
	token, err := f.write(ctx)
	if err != nil {
		return token, fmt.Errorf(
			"the join token is another and the old one is refused, but %s may still have the old one: %w\n  `pilaster orchestrator token show` shows the new one",
			f.path,
			err,
		)
	}
	return token, nil
}

// admit refuses strangers from memory, and asks the store whether a token is still the cluster's:
// another orchestrator may have rotated it just now.
func (f *tokenFile) admit(ctx context.Context, secret []byte) error {
	same := func(t join.Token) bool { return subtle.ConstantTimeCompare(secret, t.Secret[:]) == 1 }
	if same(f.current()) {
		now, err := f.store.Token(ctx)
		if err != nil || same(now) {
			return err
		}
	}
	return connect.NewError(
		connect.CodeUnauthenticated,
		errors.New(
			"the join token is not this cluster's, or was rotated; `pilaster orchestrator token show`, where the orchestrator runs, shows the one to take",
		),
	)
}
