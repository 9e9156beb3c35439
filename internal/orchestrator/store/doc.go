// Package store keeps what the cluster has allocated: the prefix of each node, the ids and keys of each tenant, the
// app of each label set. It keeps it in etcd, embedded or external.
//
// Every change is one etcd transaction, alone or batched with others, that compares the mod revision of every key it
// depends on. If one has changed, the change is decided again. So any number of orchestrators may use one etcd, even
// one that was suspended beyond all its deadlines: its transaction then does nothing.
//
// Prefixes and tenant ids are never reused: claims outlive their owners, and marks record up to where numbers were
// used. Ids of apps are few and are reused: see apps.go.
//
// The store contains every tenant's key and the authority's key. Use an etcd for this alone, with TLS and client
// certificates.
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
//	mappings/TENANT/PREFIX   Mapping: the node that has a subnet or address of a nimitz tenant
//	given/TENANT/NODE/KEY    prefixes of an endpoint of the node, or, with KEY "node", of the node
//	resting/TENANT/PREFIX    UUID of the last owner, in quarantine; with a lease
//	edge                     name of the node that is the Edge Switch
//	regions/NAME             Region: another region, as it exported itself
//	policies/TENANT/KIND/NAMESPACE/NAME
//	                         Policy: the document, as JSON
//	sessions/NODE            ids of the orchestrator process, the agent's machine and the stream; with a lease
//	deletions                written by each transaction that deletes: a range compare does not see deletions
//	marks/…                  the lowest number never allocated: of prefixes, tenant ids, and in
//	                         marks/published/NODE of publications at the node's gateway; the next number in
//	                         a tenant's CIDR (marks/overlay/…), among its apps (marks/app/…), and
//	                         for its next retirement round (marks/asked-app/…)
package store
