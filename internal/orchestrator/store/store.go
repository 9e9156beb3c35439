// Package store keeps the allocations of the cluster in etcd, embedded or external: the prefix of each node, the ids
// and keys of each tenant, the app of each label set.
//
// Each change is one etcd transaction, alone or in a batch with others. The transaction compares the mod revision of
// each key on which the change depends. If one has changed, the store decides the change again. So any number of
// orchestrators may use one etcd. An orchestrator that was suspended beyond all its deadlines changes nothing, because
// its transaction fails.
//
// Prefixes and tenant ids are never reused: a claim on a number remains after its owner is deleted, and a mark records
// the lowest number that was never allocated. Ids of apps are few, so they are reused: see apps.go.
//
// The store contains the key of each tenant and of the certificate authority. Use a separate etcd for it, with TLS and
// client certificates.
//
// Keys, under /pilaster/1/:
//
//	cluster                  UUID, plan, certificate authority, join secret
//	nodes/NAME               Node
//	uuids/UUID               name of the node with this UUID
//	deleted/UUID             name of the deleted node with this UUID; the UUID cannot register again
//	prefixes/PREFIX          UUID of the node that has or had it
//	tenants/NAME             Tenant
//	tenant-ids/ID            name of the tenant that has or had it
//	apps/TENANT/HASH         App
//	app-ids/TENANT/ID        HASH of the app's labels
//	resting-apps/TENANT/ID   HASH of the labels of an ended app, in quarantine; with a lease
//	hosting/TENANT/NODE      Hosting: the tenant's ids that the node accepts and holds, and its containers
//	                         whose app differs from the one in their address
//	mappings/TENANT/PREFIX   Mapping: the node that has a subnet or address of a tenant with mappings
//	given/TENANT/NODE/KEY    prefixes of an endpoint of the node, or, with KEY "node", of the node
//	address-keys/TENANT/HASH address of an address key and its sequence; with a lease while no container has it
//	resting/TENANT/PREFIX    UUID of the last owner, in quarantine; with a lease
//	edge                     name of the node that is the Edge Switch
//	regions/NAME             Region: the export of another region
//	policies/TENANT/KIND/NAMESPACE/NAME
//	                         Policy: the document, as JSON
//	services/TENANT/NAMESPACE/NAME
//	                         Service
//	service-addresses/TENANT/ADDRESS
//	                         name of the service with this address
//	external-addresses/ADDRESS
//	                         tenant whose services have this address for hosts outside, and the service of each port,
//	                         as JSON
//	node-ports/PROTOCOL/PORT tenant and name of the service with this node port
//	service-pools            prefixes of load-balancer addresses of services, as JSON
//	endpoints/TENANT/NAMESPACE/NAME/SLICE
//	                         EndpointSlice: containers of a node, if SLICE is NODE.k, or fixed ones
//	sessions/NODE            ids of the orchestrator process, the agent's machine and the stream; with a lease
//	load/NODE                NodeLoad: what the node reported of its load; with a lease
//	protected                prefixes that only egress rules for them or parts of them allow, as JSON
//	offload-auto             "on": offloads start and end by the nodes' loads
//	deletions                written by each transaction that deletes, because a range compare does not detect
//	                         deletions
//	marks/…                  the lowest number never allocated: of prefixes, tenant ids, offloads, and in
//	                         marks/published/NODE of publications at the node's gateway, and in marks/egress/NODE
//	                         of its addresses as an egress gateway; of tenants for services (marks/services), and
//	                         in marks/service/TENANT of its services; the next number in
//	                         a tenant's CIDR (marks/overlay/…), among its apps (marks/app/…), and
//	                         for its next retirement round (marks/asked-app/…)
package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const root = "/pilaster/1/"

const (
	keyCluster       = root + "cluster"
	dirNodes         = root + "nodes/"
	dirUUIDs         = root + "uuids/"
	dirDeleted       = root + "deleted/"
	dirReclaimed     = root + "recalled/"
	dirPrefixes      = root + "prefixes/"
	dirTenants       = root + "tenants/"
	dirTenantIDs     = root + "tenant-ids/"
	dirApps          = root + "apps/"
	dirAppIDs        = root + "app-ids/"
	dirAppQuarantine = root + "resting-apps/"
	dirHosting       = root + "hosting/"
	dirSessions      = root + "sessions/"
	dirUnreachable   = root + "unreachable/" // nodes that do not answer
	dirMappings      = root + "mappings/"
	dirImporter      = root + "importer/" // the orchestrator that writes imported mappings
	dirAllocations   = root + "given/"
	dirAddressKeys   = root + "address-keys/"
	dirQuarantine    = root + "resting/"
	keyEdge          = root + "edge"
	dirRegions       = root + "regions/"
	dirPolicies      = root + "policies/"
	dirServices      = root + "services/"
	dirEndpoints     = root + "endpoints/"
	dirServiceClaims = root + "service-addresses/"
	dirExternal      = root + "external-addresses/"
	dirNodePorts     = root + "node-ports/"
	keyServicePools  = root + "service-pools"
	keyServicesMark  = root + "marks/services"
	dirServiceMarks  = root + "marks/service/"
	keyDeletions     = root + "deletions"
	keyPrefixMark    = root + "marks/prefix"
	keyTenantMark    = root + "marks/tenant"
	keyOffloadMark   = root + "marks/offload"
	keyOffloadAuto   = root + "offload-auto"
	dirLoads         = root + "load/"
	dirAppMarks      = root + "marks/app/"
	dirRoundMarks    = root + "marks/asked-app/"
	dirOverlayMarks  = root + "marks/overlay/"

	keyProtected    = root + "protected"
	dirGatewayMarks = root + "marks/egress/"

	dirPublishedMarks = root + "marks/published/"
	dirPublished      = root + "published/"    // of earlier builds; see adoptIndexes
	dirWithdrawn      = root + "withdrawn/"    // of earlier builds; see adoptIndexes
	requestTimeout    = 5 * time.Second        // timeout of one etcd request
	readTimeout       = 500 * time.Millisecond // timeout of the first attempt of a read, doubled for each further one
)

// Store allocates prefixes, ids, keys and apps. Its methods may be called concurrently.
type Store struct {
	etcd            *clientv3.Client
	log             *slog.Logger
	committer       committer
	cluster         Cluster
	lease           atomic.Int64 // of this process's sessions
	quarantineLease atomic.Pointer[quarantineLease]
	appLimit        int // per tenant
	conflicts       atomic.Uint64
	committed       atomic.Int64  // etcd's revision of the last commit
	watched         atomic.Int64  // etcd's revision up to which Watch has called apply
	rewound         chan struct{} // signals that a read returned an older revision than watched
}

// Cluster returns what Open found or created.
func (s *Store) Cluster() Cluster { return s.cluster }

// Conflicts returns how many transactions were retried because another orchestrator committed first.
func (s *Store) Conflicts() uint64 { return s.conflicts.Load() }

// Revision returns the revision of this process's last change.
func (s *Store) Revision() int64 { return s.cluster.From + s.committed.Load() }

// Ping reports whether a majority of the store answers.
func (s *Store) Ping(ctx context.Context) error {
	return s.change(ctx, func(t *txn) error {
		_, err := t.get(keyCluster)
		return err
	})
}

// Reason classifies an Error.
type Reason int

const (
	Invalid     Reason = iota + 1 // the request is invalid
	NotFound                      // the named object does not exist
	Exists                        // the object exists already
	Refused                       // the state of the cluster forbids it
	Full                          // a limit is reached
	Stale                         // the revision of the request is compacted; start again
	Unavailable                   // the store does not answer; the text states whether the change may have happened
)

// Error is a refusal. Its text is for administrators.
type Error struct {
	Reason Reason
	Text   string
	cause  error
}

func (e *Error) Error() string { return e.Text }
func (e *Error) Unwrap() error { return e.cause }

func refuse(r Reason, format string, args ...any) error {
	return &Error{Reason: r, Text: fmt.Sprintf(format, args...)}
}

func unavailable(err error) error {
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	if errors.Is(err, rpctypes.ErrNoSpace) {
		return &Error{
			Full,
			"the store has reached its size limit and accepts no change; nothing was changed: restart the " +
				"orchestrator, which makes room in its embedded etcd" +
				" (if the etcd cluster is external, compact and defragment it and disarm the alarm with etcdctl)",
			err,
		}
	}
	if errors.Is(err, rpctypes.ErrLeaseNotFound) { // until KeepSessions has a new lease
		return &Error{
			Unavailable,
			"the store has just lost the sessions of this orchestrator's nodes; nothing was changed: try again",
			err,
		}
	}
	return &Error{
		Unavailable,
		fmt.Sprintf("the store did not answer, so it is not known whether anything changed; try again: %v", err),
		err,
	}
}
