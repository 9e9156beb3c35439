package admission

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

// TokenFile keeps the file join-token equal to the store's token, also when another orchestrator rotates it.
type TokenFile struct {
	store   *store.Store
	path    string
	changed chan struct{} // capacity one

	writing sync.Mutex
	Known   atomic.Pointer[join.Token] // the last token read from the store; written to the file next
}

func NewTokenFile(s *store.Store, dataDir string) *TokenFile {
	return &TokenFile{store: s, path: filepath.Join(dataDir, "join-token"), changed: make(chan struct{}, 1)}
}

// Write reads the token from the store and writes it to the file. Writes are serialized, so that the file never gets an
// older token after a newer one.
func (f *TokenFile) Write(ctx context.Context) (join.Token, error) {
	f.writing.Lock()
	defer f.writing.Unlock()
	token, err := f.store.Token(ctx)
	if err != nil {
		return token, err
	}
	f.Known.Store(&token)
	return token, statefile.WriteBytes(f.path, []byte(token.String()+"\n"), 0o600)
}

// Current returns the last token read from the store.
func (f *TokenFile) Current() join.Token { return *f.Known.Load() }

// HandleBatch receives every batch of the store and never blocks.
func (f *TokenFile) HandleBatch(b store.Batch) {
	if !b.Cluster {
		return
	}
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

// Run writes each rotated token to the file, until ctx ends.
func (f *TokenFile) Run(ctx context.Context, log *slog.Logger) {
	for {
		select {
		case <-f.changed:
		case <-ctx.Done():
			return
		}
		for {
			once, cancel := context.WithTimeout(ctx, CallTimeout)
			_, err := f.Write(once)
			cancel()
			if err == nil || ctx.Err() != nil {
				break
			}
			log.Warn("the join token in the file may be outdated; retrying", "file", f.path, "error", err)
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
				return
			}
		}
	}
}

// Rotate returns when every orchestrator refuses the old token and the local file has the new one.
func (f *TokenFile) Rotate(ctx context.Context) (join.Token, error) {
	if _, err := f.store.RotateToken(ctx); err != nil {
		return join.Token{}, err
	}
	token, err := f.Write(ctx)
	if err != nil {
		return token, fmt.Errorf(
			"the join token was rotated and the old one is refused, but %s may still have the old one: %w\n  "+
				"`pilaster orchestrator token show` shows the new one",
			f.path,
			err,
		)
	}
	return token, nil
}

// Admit refuses a wrong token without a call to the store. If the token matches, Admit reads the store, because another
// orchestrator may have just rotated the token. A valid token protects the call's connection from replacement.
func (f *TokenFile) Admit(ctx context.Context, secret []byte) error {
	same := func(t join.Token) bool { return subtle.ConstantTimeCompare(secret, t.Secret[:]) == 1 }
	if same(f.Current()) {
		now, err := f.store.Token(ctx)
		if err != nil {
			return err
		}
		if same(now) {
			connOf(ctx).protect()
			return nil
		}
	}
	return connect.NewError(
		connect.CodeUnauthenticated,
		errors.New(
			"the join token is not this cluster's, or was rotated; `pilaster orchestrator token show`, run on the "+
				"orchestrator's machine, shows the current one",
		),
	)
}
