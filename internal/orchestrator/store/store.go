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
	dirMappings      = root + "mappings/"
	dirImporter      = root + "importer/" // the orchestrator that writes imported mappings
	dirAllocations   = root + "given/"
	dirAddressKeys   = root + "address-keys/"
	dirQuarantine    = root + "resting/"
	keyEdge          = root + "edge"
	dirRegions       = root + "regions/"
	dirPolicies      = root + "policies/"
	keyDeletions     = root + "deletions"
	keyPrefixMark    = root + "marks/prefix"
	keyTenantMark    = root + "marks/tenant"
	dirAppMarks      = root + "marks/app/"
	dirRoundMarks    = root + "marks/asked-app/"
	dirOverlayMarks  = root + "marks/overlay/"

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
