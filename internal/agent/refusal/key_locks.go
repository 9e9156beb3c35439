package refusal

import (
	"context"

	"pilaster.io/pilaster/internal/keymutex"
)

// KeyLocks are per-key locks whose errors are refusals.
type KeyLocks struct{ locks keymutex.Locks }

// Lock waits for the key or for ctx to end.
func (k *KeyLocks) Lock(ctx context.Context, key string) (unlock func(), err error) {
	if unlock, err = k.locks.Lock(ctx, key); err != nil {
		return nil, New(ErrUnavailable, "%w", err)
	}
	return unlock, nil
}
