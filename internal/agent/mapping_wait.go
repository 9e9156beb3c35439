package agent

import (
	"context"
	"time"

	"pilaster.io/pilaster/internal/tenant"
)

// ListWait is how long an ADD of a newly hosted tenant waits for the tenant's mappings: until they arrive, packets to
// other nodes are dropped.
const ListWait = 5 * time.Second

// SetHasMappings sets which tenants have mappings; ADDs of newly hosted ones then wait for the first list.
func (t *Tenants) SetHasMappings(isMapped func(tenant.Tenant) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hasMappings = isMapped
}

// SetListed ends the wait of ADDs for a tenant's mappings.
func (t *Tenants) SetListed(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.m[name]; h != nil && h.mappingsListed != nil {
		close(h.mappingsListed)
		h.mappingsListed = nil
	}
}

// awaitList waits up to ListWait for the first list of mappings of a newly hosted tenant.
func (c *Core) awaitList(ctx context.Context, name string) {
	c.tenants.mu.Lock()
	h := c.tenants.m[name]
	var listed <-chan struct{}
	if h != nil {
		listed = h.mappingsListed
	}
	c.tenants.mu.Unlock()
	if listed == nil {
		return
	}
	select {
	case <-listed:
	case <-ctx.Done():
	case <-time.After(ListWait):
		c.log.Warn(
			"an endpoint is active before the mappings of its tenant arrived; packets to other nodes are dropped "+
				"until then",
			"tenant",
			name,
			"waited",
			ListWait,
		)
	}
}
