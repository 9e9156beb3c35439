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
//	sessions/NODE            ids of the orchestrator process, the agent's machine and the stream; with a lease
//	deletions                written by each transaction that deletes, because a range compare does not detect
//	                         deletions
//	marks/…                  the lowest number never allocated: of prefixes, tenant ids, and in
//	                         marks/published/NODE of publications at the node's gateway; the next number in
//	                         a tenant's CIDR (marks/overlay/…), among its apps (marks/app/…), and
//	                         for its next retirement round (marks/asked-app/…)
package store
