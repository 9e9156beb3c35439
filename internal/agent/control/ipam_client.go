package control

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
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/unixrpc"
)

var (
	_ network.Cluster      = (*Link)(nil)
	_ network.KeyedCluster = (*Link)(nil)
)

// allocation identifies the addresses of one endpoint of a tenant.
type allocation struct{ tenant, key string }

// NodeCIDRs implements network.Cluster. The answer is stored with the tenant.
func (l *Link) NodeCIDRs(ctx context.Context, name string) ([]netip.Prefix, error) {
	if has := l.config.Tenants.Subnets(name); len(has) > 0 {
		return has, nil
	}
	resp, err := l.allocate(ctx, &pilasterv1.AllocateRequest{Tenant: name})
	if err != nil {
		return nil, err
	}
	subnets, err := prefixesOf(resp)
	if err != nil {
		return nil, err
	}
	return subnets, l.config.Tenants.SetSubnets(name, subnets)
}

// Allocate implements network.Cluster.
func (l *Link) Allocate(ctx context.Context, name, key string, app address.AppID) ([]netip.Addr, error) {
	resp, err := l.allocate(ctx, &pilasterv1.AllocateRequest{Tenant: name, Key: key, App: uint32(app)})
	if err != nil {
		return nil, err
	}
	return addressesOf(name, resp)
}

func addressesOf(name string, resp *pilasterv1.AllocateResponse) ([]netip.Addr, error) {
	prefixes, err := prefixesOf(resp)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, p := range prefixes {
		if !p.IsSingleIP() {
			return nil, fmt.Errorf("the orchestrator allocated %v of tenant %s for one endpoint", p, name)
		}
		addrs = append(addrs, p.Addr())
	}
	return addrs, nil
}

// AllocateKeyed implements network.KeyedCluster.
func (l *Link) AllocateKeyed(
	ctx context.Context,
	name string,
	of network.KeyedEndpoint,
) (is network.KeyedAddress, err error) {
	resp, err := l.allocate(ctx, &pilasterv1.AllocateRequest{
		Tenant: name, Key: of.Key, App: uint32(of.App), AddressKey: of.AddressKey, Sequence: of.Sequence,
	})
	if err != nil {
		return is, err
	}
	addrs, err := addressesOf(name, resp)
	if err != nil {
		return is, err
	}
	if len(addrs) != 1 || resp.Sequence == 0 {
		return is, fmt.Errorf("the orchestrator allocated %v with sequence %d for address key %q of tenant %s: "+
			"it knows no address keys; upgrade the orchestrators", addrs, resp.Sequence,
			of.AddressKey, name)
	}
	is = network.KeyedAddress{Address: addrs[0], Sequence: resp.Sequence, Elsewhere: resp.Elsewhere}
	if resp.FormerNode != "" {
		if is.Former, err = netip.ParsePrefix(resp.FormerNode); err != nil {
			return is, fmt.Errorf("the orchestrator's answer cannot be used: %w", err)
		}
	}
	return is, nil
}

func (l *Link) allocate(
	ctx context.Context,
	request *pilasterv1.AllocateRequest,
) (*pilasterv1.AllocateResponse, error) {
	name, key := request.Tenant, request.Key
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	client, err := l.dial(ctx)
	var resp *connect.Response[pilasterv1.AllocateResponse]
	if err == nil {
		resp, err = client.Allocate(ctx, connect.NewRequest(request))
	}
	if err != nil {
		if key != "" && retriable(err) {
			l.setPendingFree(name, key, true) // the orchestrator may have allocated it nevertheless
		}
		return nil, l.resolveError(err, fmt.Sprintf("the orchestrator allocates addresses of tenant %s", name))
	}
	return resp.Msg, nil
}

func prefixesOf(resp *pilasterv1.AllocateResponse) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix
	for _, text := range resp.Prefixes {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("the orchestrator's answer cannot be used: %w", err)
		}
		prefixes = append(prefixes, p)
	}
	return prefixes, nil
}

// Free implements network.Cluster. A failed release is retried later, so that the removal of the container can
// continue.
func (l *Link) Free(ctx context.Context, name, key string) error {
	err := l.free(ctx, name, key)
	if err == nil {
		return nil
	}
	if permanent(err) {
		l.config.Log.Error(
			"the orchestrator refused to release addresses; no retry",
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
		"releasing addresses failed; retrying while connected to the orchestrator",
		"tenant",
		name,
		"endpoint",
		key,
		"error",
		unixrpc.Words(err),
	)
	return nil
}

// permanent reports whether a retry of the same request cannot succeed.
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

// freeUnused releases the addresses of an endpoint key, unless an endpoint uses the key again.
func (l *Link) freeUnused(ctx context.Context, core Core, name, key string) {
	l.setPendingFree(name, key, false)
	if err := core.IfUnused(ctx, key, func() error { return l.Free(ctx, name, key) }); err != nil {
		l.setPendingFree(name, key, true)
		l.config.Log.Warn(
			"releasing addresses of a removed endpoint failed",
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

// setFreeRunner sets the function that starts retryFrees while a stream is open; nil when it ends. A node has pending
// releases only after a failure, so no goroutine waits for them.
func (l *Link) setFreeRunner(run func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.startFrees = run; run != nil && len(l.pendingFrees) > 0 {
		l.startPendingFrees()
	}
}

// startPendingFrees starts retryFrees unless it runs. The caller holds the lock.
func (l *Link) startPendingFrees() {
	if l.startFrees != nil && !l.freeing {
		l.freeing = true
		l.startFrees()
	}
}

// maxFrees is the number of concurrent releases.
const maxFrees = 4

// retryFrees releases the pending addresses until none is left or ctx ends.
func (l *Link) retryFrees(ctx context.Context, core Core) {
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

// pendingNow returns the pending releases; none once ctx has ended. If it returns none, the retry loop ends.
func (l *Link) pendingNow(ctx context.Context) (late []allocation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ctx.Err() == nil {
		late = slices.Collect(maps.Keys(l.pendingFrees))
	}
	l.freeing = len(late) > 0
	return late
}
