package agent

import (
	"context"

	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/keymutex"
)

// keyLocks are per-key locks whose errors are refusals.
type keyLocks struct{ keymutex.Locks }

// lock waits for the key or for ctx to end.
func (k *keyLocks) lock(ctx context.Context, key string) (unlock func(), err error) {
	if unlock, err = k.Lock(ctx, key); err != nil {
		return nil, refusal.New(refusal.ErrUnavailable, "%w", err)
	}
	return unlock, nil
}
