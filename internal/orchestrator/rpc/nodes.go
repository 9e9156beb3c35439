package rpc

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// Limits of a node's reports, which the store keeps.
const (
	MaxVersion   = 256     // bytes
	MaxUplinks   = 64      // addresses
	MaxForm      = 128     // bytes
	MaxRack      = 128     // bytes
	MaxProblem   = 1024    // bytes of the text of a problem
	MaxTenants   = 65_535  // as many as tenant ids in a node's datapath
	MaxApps      = 1 << 18 // of all tenants
	MaxOverrides = 4096    // of all tenants
)

// NodeService serves agents. The certificate determines the node, and a node acts only as itself.
type NodeService struct {
	Store      *store.Store
	Cache      *cache.Cache
	Token      *admission.TokenFile
	Timeout    time.Duration // to write a message of a stream, or to read the first
	Now        func() time.Time
	Log        *slog.Logger
	Limiter    *admission.CallLimiter
	Lists      *admission.Rates[string]    // queries for mappings, by tenant; nil if there is no limit
	LoadWrites *rate.Limiter               // of nodes' loads, into the store; nil if there is no limit
	Later      func(func(context.Context)) // runs work that outlives the call
}

func (s *NodeService) Join(
	ctx context.Context,
	req *connect.Request[pilasterv1.JoinRequest],
) (*connect.Response[pilasterv1.JoinResponse], error) {
	secret, _ := hex.DecodeString(req.Msg.Secret)
	if err := s.Token.Admit(ctx, secret); err != nil {
		return nil, err
	}
	node := pki.Node{Name: req.Msg.NodeName, UUID: req.Msg.NodeUuid}
	if err := s.Store.Admit(ctx, node); err != nil {
		return nil, err
	}
	certificate, err := s.certify(node, req.Msg.Csr)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(
		&pilasterv1.JoinResponse{Certificate: certificate, Ca: s.Store.Cluster().Authority.Certificate()},
	), nil
}

func (s *NodeService) Renew(
	ctx context.Context,
	req *connect.Request[pilasterv1.RenewRequest],
) (*connect.Response[pilasterv1.RenewResponse], error) {
	node, valid := admission.Caller(ctx)
	admit := func() error { return s.Store.Admit(ctx, node) }
	if !valid {
		node, _ = admission.ExpiredCaller(ctx)
		s.awaitPredecessor(ctx, node, admission.Instance(ctx))
		admit = func() error { return s.Store.Readmit(ctx, node, admission.Instance(ctx)) }
	}
	if err := admit(); err != nil {
		return nil, err
	}
	certificate, err := s.certify(node, req.Msg.Csr)
	if err != nil {
		return nil, err
	}
	if !valid {
		s.Log.Warn(
			"a node with a certificate outside its validity period received a new one",
			"node",
			node.Name,
			"uuid",
			node.UUID,
		)
	}
	return connect.NewResponse(&pilasterv1.RenewResponse{Certificate: certificate}), nil
}

func (s *NodeService) certify(n pki.Node, csr []byte) ([]byte, error) {
	certificate, err := s.Store.Cluster().Authority.SignNode(csr, n, s.Now())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	return certificate, nil
}

func (s *NodeService) Register(
	ctx context.Context,
	req *connect.Request[pilasterv1.RegisterRequest],
) (*connect.Response[pilasterv1.RegisterResponse], error) {
	cluster := s.Store.Cluster()
	if pinned := req.Msg.ClusterUuid; pinned != "" && pinned != cluster.UUID {
		return nil, connect.NewError(
			connect.CodeFailedPrecondition,
			fmt.Errorf(
				"this node belongs to cluster %s, and this is cluster %s; nothing was changed: set the right "+
					"orchestrator, or empty the node's state directory to join this one",
				pinned,
				cluster.UUID,
			),
		)
	}
	r, err := registration(ctx, req.Msg)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if err := s.checkUplinks(r.Uplinks); err != nil {
		return nil, err
	}
	if other := s.Cache.OtherForm(r.Node.Name, r.Form); other != nil {
		return nil, connect.NewError(
			connect.CodeFailedPrecondition,
			fmt.Errorf(
				"this node's agent has %s, and that of node %s has %s, so their containers would not reach each "+
					"other; nothing was changed: start all agents with the same flags (to change them, stop all "+
					"agents first; packets flow meanwhile)",
				r.Form,
				other.Name,
				other.Form,
			),
		)
	}
	if node := s.Cache.Registered(r); node != nil {
		return connect.NewResponse(
			&pilasterv1.RegisterResponse{Node: node, Plan: plan(s.plan()), ClusterUuid: cluster.UUID},
		), nil
	}
	if n := s.Cache.Claims(r.Node.Name, r.Mappings); n > 0 {
		if err := s.Cache.CheckRoom(r.Node.Name, n); err != nil {
			return nil, err
		}
	}
	s.awaitPredecessor(ctx, r.Node, r.Instance)
	node, err := s.Store.Register(ctx, r)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(
		&pilasterv1.RegisterResponse{Node: node, Plan: plan(s.plan()), ClusterUuid: cluster.UUID},
	), nil
}

// plan returns the plan with what tenants have made the cluster reserve.
func (s *NodeService) plan() address.Plan { return withReservations(s.Store.Cluster().Plan, s.Cache) }

func withReservations(p address.Plan, c *cache.Cache) address.Plan {
	p.Identifiers = c.HasIdentifiers()
	return p
}

// checkUplinks refuses a node with an address on the fabric of which other nodes drop packets.
func (s *NodeService) checkUplinks(all []netip.Addr) error {
	reserved := s.plan().ReservedPrefix()
	for _, a := range all {
		if reserved.Contains(a) {
			return connect.NewError(
				connect.CodeFailedPrecondition,
				fmt.Errorf(
					"the node's uplink has address %v of %v, which this cluster reserves for tenants on network %s; "+
						"nothing was changed: give the uplink another address",
					a,
					reserved,
					tenant.NetworksWith(tenant.Identifiers),
				),
			)
		}
	}
	return nil
}

// registration reads a node's request to register, and refuses one that exceeds a limit.
func registration(ctx context.Context, m *pilasterv1.RegisterRequest) (r store.Registration, err error) {
	r.Node, _ = admission.Caller(ctx)
	r.Instance = admission.Instance(ctx)
	if len(m.Version) > MaxVersion || len(m.UplinkAddresses) > MaxUplinks {
		return r, fmt.Errorf(
			"the node reports a version of %d bytes and %d uplink addresses; the maximum is %d and %d",
			len(m.Version),
			len(m.UplinkAddresses),
			MaxVersion,
			MaxUplinks,
		)
	}
	if err := checkHeld(m.Held); err != nil {
		return r, err
	}
	for _, network := range m.Enforces {
		if _, known := tenant.TraitsOf(network); !known {
			continue // a network of a later build
		}
		r.Enforces = append(r.Enforces, network)
	}
	slices.Sort(r.Enforces)
	r.Enforces = slices.Compact(r.Enforces)
	r.Edge, r.Gateway, r.Published = m.Edge, m.Gateway, m.Held.GetPublished()
	if r.Form = printable(m.Form); len(r.Form) > MaxForm {
		return r, fmt.Errorf("the node reports a form of packets of %d bytes; the maximum is %d", len(r.Form), MaxForm)
	}
	if r.Rack = printable(m.Rack); len(r.Rack) > MaxRack {
		return r, fmt.Errorf("the name of the node's rack has %d bytes; the maximum is %d", len(r.Rack), MaxRack)
	}
	r.Offloads, r.Egress, r.MTUReserve = m.Offloads, m.Egress, m.MtuReserve
	r.Version = printable(m.Version)
	r.Tenants, r.Apps, r.Mappings = m.Held.GetTenants(), m.Held.GetApps(), m.Held.GetMappings()
	if m.WantedPrefix != "" {
		if r.Prefix, err = netip.ParsePrefix(m.WantedPrefix); err != nil {
			return r, fmt.Errorf("node prefix: %w", err)
		}
	}
	for _, text := range m.UplinkAddresses {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return r, fmt.Errorf("uplink address: %w", err)
		}
		r.Uplinks = append(r.Uplinks, a)
	}
	return r, nil
}

func checkHeld(held *pilasterv1.Held) error {
	if tenants, apps := len(held.GetTenants()), len(held.GetApps()); tenants > MaxTenants || apps > MaxApps {
		return fmt.Errorf(
			"the node holds %s with %s, and the maximum is %d with %d; nothing was changed: host fewer tenants on it",
			humanize.Of(tenants, "tenant", "tenants"),
			humanize.Of(apps, "app", "apps"),
			MaxTenants,
			MaxApps,
		)
	}
	if mappings := len(held.GetMappings()); mappings > cache.MaxMappings {
		return fmt.Errorf(
			"the node holds %d addresses and subnets of tenants, and a node may have %d; nothing was changed: remove "+
				"containers from it",
			mappings,
			cache.MaxMappings,
		)
	}
	for _, t := range held.GetTenants() {
		if len(t.Ids) > tenant.MaxIDs {
			return fmt.Errorf(
				"the node holds %d ids of a tenant, and a tenant has %d at most; nothing was changed",
				len(t.Ids),
				tenant.MaxIDs,
			)
		}
	}
	return nil
}

func plan(p address.Plan) *pilasterv1.Plan {
	out := &pilasterv1.Plan{
		BasePrefix: p.Base.String(), PrivatePrefix: p.Private.String(), Identifiers: p.Identifiers,
	}
	if p.Egress.IsValid() {
		out.EgressPrefix = p.Egress.String()
	}
	for _, gateway := range []netip.Prefix{p.Gateway4, p.Gateway6} {
		if gateway.IsValid() {
			out.GatewayPrefixes = append(out.GatewayPrefixes, gateway.String())
		}
	}
	return out
}

func (s *NodeService) Resolve(
	ctx context.Context,
	req *connect.Request[pilasterv1.ResolveRequest],
) (*connect.Response[pilasterv1.ResolveResponse], error) {
	node, err := s.acting(ctx)
	if err != nil {
		return nil, err
	}
	resolve := s.Store.Resolve
	if req.Msg.Exposes {
		resolve = s.Store.ResolveExposing
	}
	tenant, app, err := resolve(ctx, node, req.Msg.Sequence, req.Msg.Tenant, req.Msg.Labels)
	if err != nil {
		return nil, err
	}
	// The cache may not have the latest changes of other orchestrators.
	hasPolicies, err := s.Store.HasPolicies(ctx, tenant.Name)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(
		&pilasterv1.ResolveResponse{Tenant: s.Cache.WithDerived(tenant), App: app, HasPolicies: hasPolicies},
	), nil
}

// acting returns the calling node if it is registered and no other machine is connected with its identity.
func (s *NodeService) acting(ctx context.Context) (pki.Node, error) {
	node, _ := admission.Caller(ctx)
	if err := s.registered(ctx); err != nil {
		return node, err
	}
	s.awaitPredecessor(ctx, node, admission.Instance(ctx))
	return node, s.Cache.Session(node.Name).Admit(node.Name, admission.Instance(ctx))
}

// registered refuses a node that is not registered. First it waits for a moment: the node may just have registered with
// another orchestrator.
func (s *NodeService) registered(ctx context.Context) error {
	n, _ := admission.Caller(ctx)
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := s.Cache.AwaitNode(ctx, n.Name, func() bool { return s.Cache.Knows(n) }); err != nil {
		return connect.NewError(
			connect.CodeFailedPrecondition,
			fmt.Errorf("node %s is not registered; register first", n.Name),
		)
	}
	return nil
}

// printable replaces control characters in a node's text, which operators see on a terminal.
func printable(words string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, words)
}
