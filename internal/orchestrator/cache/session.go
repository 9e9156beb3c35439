package cache

import (
	"context"
	"time"

	"pilaster.io/pilaster/internal/orchestrator/store"
)

// MaxLag is how long the end of a stream may take to be seen by every orchestrator; for so long nobody
// identify refused because of it.
const MaxLag = 5 * time.Second

func (m *Cache) Session(node string) store.Session {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.Sessions[node]
}

// AwaitSession waits a moment until the session of a node is as it should be.
func (m *Cache) AwaitSession(ctx context.Context, node string, should func(store.Session) bool) error {
	ctx, cancel := context.WithTimeout(ctx, m.Lag)
	defer cancel()
	return m.AwaitNode(ctx, node, func() bool { return should(m.Sessions[node]) })
}
