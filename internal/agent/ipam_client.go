package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/unixrpc"
)

var _ network.Cluster = (*Link)(nil)

// allocation is what an endpoint had of a tenant.
type allocation struct{ tenant, key string }

// NodeCIDRs implements network.Cluster. What was given once is kept with the tenant.
func (l *Link) NodeCIDRs(ctx context.Context, name string) ([]netip.Prefix, error) {
	if has := l.config.Tenants.subnets(name); len(has) > 0 {
		return has, nil
	}
	subnets, err := l.allocate(ctx, name, "")
	if err != nil {
		return nil, err
	}
	return subnets, l.config.Tenants.setSubnets(name, subnets)
}

// Allocate implements network.Cluster.
func (l *Link) Allocate(ctx context.Context, name, key string) ([]netip.Addr, error) {
	prefixes, err := l.allocate(ctx, name, key)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, p := range prefixes {
		if !p.IsSingleIP() {
			return nil, fmt.Errorf("the orchestrator gave %v of tenant %s for one endpoint", p, name)
		}
		addrs = append(addrs, p.Addr())
	}
	return addrs, nil
}

func (l *Link) allocate(ctx context.Context, name, key string) ([]netip.Prefix, error) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	client, err := l.dial(ctx)
	var resp *connect.Response[pilasterv1.AllocateResponse]
	if err == nil {
		resp, err = client.Allocate(ctx, connect.NewRequest(&pilasterv1.AllocateRequest{Tenant: name, Key: key}))
	}
	if err != nil {
		if key != "" && retriable(err) {
			l.setPendingFree(name, key, true) // it may have been given all the same
		}
		return nil, l.resolveError(err, fmt.Sprintf("addresses of tenant %s are given by the orchestrator", name))
	}
	var prefixes []netip.Prefix
	for _, text := range resp.Msg.Prefixes {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("the orchestrator's answer cannot be used: %w", err)
		}
		prefixes = append(prefixes, p)
	}
	return prefixes, nil
}

// Free implements network.Cluster. What does not succeed is done later, so that containers can go.
func (l *Link) Free(ctx context.Context, name, key string) error {
	err := l.free(ctx, name, key)
	if err == nil {
		return nil
	}
	if permanent(err) {
		l.config.Log.Error(
			"addresses are not given back: the orchestrator refuses, and is not asked again",
			"tenant",
			name,
			"endpoint",
			key,
			"error",
			unixrpc.Words(err),
		)
		return nil
	}
	l.setPendingFree(name, key, true)
	l.config.Log.Warn(
		"addresses are not given back yet; trying again while there is a connection to the orchestrator",
		"tenant",
		name,
		"endpoint",
		key,
		"error",
		unixrpc.Words(err),
	)
	return nil
}

// permanent errors are those of what is asked, which stay.
func permanent(err error) bool {
	var remote *connect.Error
	if !errors.As(err, &remote) {
		return false
	}
	switch remote.Code() {
	case connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeNotFound, connect.CodeUnimplemented:
		return true
	}
	return false
}

func (l *Link) free(ctx context.Context, name, key string) error {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	client, err := l.dial(ctx)
	if err == nil {
		_, err = client.Free(ctx, connect.NewRequest(&pilasterv1.FreeRequest{Tenant: name, Key: key}))
	}
	return err
}

// freeUnused gives back what an endpoint had, unless there is one again with its key.
func (l *Link) freeUnused(ctx context.Context, core *Core, name, key string) {
	l.setPendingFree(name, key, false)
	if err := core.ifUnused(ctx, key, func() error { return l.Free(ctx, name, key) }); err != nil {
		l.setPendingFree(name, key, true)
		l.config.Log.Warn(
			"addresses that no endpoint has are not given back yet",
			"tenant",
			name,
			"endpoint",
			key,
			"error",
			err,
		)
	}
}

func (l *Link) setPendingFree(name, key string, is bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !is {
		delete(l.pendingFrees, allocation{name, key})
		return
	}
	l.pendingFrees[allocation{name, key}] = true
	l.startPendingFrees()
}

// setFreeRunner says how to run what gives back late, until there is no stream any more, and nil then. A node has nothing
// sinks give back but after a fault: nobody waits for that.
func (l *Link) setFreeRunner(run func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.startFrees = run; run != nil && len(l.pendingFrees) > 0 {
		l.startPendingFrees()
	}
}

// startPendingFrees needs the lock.
func (l *Link) startPendingFrees() {
	if l.startFrees != nil && !l.freeing {
		l.freeing = true
		l.startFrees()
	}
}

// maxFrees is how many are given back at the same time.
const maxFrees = 4

// retryFrees gives back what could not be before, until nothing is left or ctx ends.
func (l *Link) retryFrees(ctx context.Context, core *Core) {
	for n := 0; ; n++ {
		late := l.pendingNow(ctx)
		if len(late) == 0 {
			return
		}
		if l.config.Wait(ctx, n, 0) != nil {
			continue // ctx has ended
		}
		places := make(chan struct{}, maxFrees)
		var frees sync.WaitGroup
		for _, a := range late {
			places <- struct{}{}
			frees.Go(func() {
				defer func() { <-places }()
				l.freeUnused(ctx, core, a.tenant, a.key)
			})
		}
		frees.Wait()
	}
}

// pendingNow is what is to be given back; nothing once ctx has ended. Whoever is told of nothing is done.
func (l *Link) pendingNow(ctx context.Context) (late []allocation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ctx.Err() == nil {
		late = slices.Collect(maps.Keys(l.pendingFrees))
	}
	l.freeing = len(late) > 0
	return late
}
