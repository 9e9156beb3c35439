package cache

import (
	"context"
	"time"

	"pilaster.io/pilaster/internal/orchestrator/store"
)

// MaxLag is how long the end of a stream may take to reach all orchestrators. Before it has passed, an orchestrator
// does not refuse a node because of the node's previous stream.
const MaxLag = 5 * time.Second

func (m *Cache) Session(node string) store.Session {
	m.Mu.RLock()
	defer m.Mu.RUnlock()
	return m.Sessions[node]
}

// AwaitSession waits at most MaxLag until the session of a node meets a condition.
func (m *Cache) AwaitSession(ctx context.Context, node string, should func(store.Session) bool) error {
	ctx, cancel := context.WithTimeout(ctx, m.Lag)
	defer cancel()
	return m.AwaitNode(ctx, node, func() bool { return should(m.Sessions[node]) })
}
