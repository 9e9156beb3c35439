// Package store is what the cluster has promised: which node holds which prefix, which tenant which ids and keys, which
// label set is which app. It lives in etcd, embedded or a cluster of its own.
//
// Every change is made by one etcd transaction, alone or with others that waited with it, that compares the mod
// revision of everything it was decided on, and is decided anew when one of them has changed. So any number of
// orchestrators may work on one etcd, also one that slept past all its deadlines: what it decided on is then no longer
// so, and its transaction does nothing.
//
// What has been handed out is never handed out again: claims on prefixes and tenant ids outlive their owners, and marks
// say up to where numbers were used. Numbers of apps are few, and go round: see apps.go.
//
// Who can read the store can read every tenant's key and the authority's: keep an etcd of one's own for this alone,
// behind TLS and client certificates.
//
// Keys, under /pilaster/1/:
//
//	cluster                  UUID, plan, certificate authority, join secret
//	nodes/NAME               Node
//	uuids/UUID               name of the node with this UUID
//	deleted/UUID             name of the node that had it; the UUID may not come back
//	prefixes/PREFIX          UUID of the node that has or had it
//	tenants/NAME             Tenant
//	tenant-ids/ID            name of the tenant that has or had it
//	apps/TENANT/HASH         App
//	app-ids/TENANT/ID        HASH of the app's labels
//	resting-apps/TENANT/ID   HASH of the labels whose app it was a moment ago; with a lease
//	hosting/TENANT/NODE      Hosting: which of the tenant's ids the node accepts and holds, and which of its containers are of another
//	                         app than their address says
//	mappings/TENANT/PREFIX   Mapping: which node a subnet or an address of a nimitz tenant is given to
//	given/TENANT/NODE/KEY    what an endpoint of the node has of the tenant, or with KEY "node" the node
//	resting/TENANT/PREFIX    who had it a moment ago; with a lease
//	edge                     name of the node that is the Edge Switch
//	regions/NAME             Region: another one, as it exported itself
//	policies/TENANT/KIND/NAMESPACE/NAME
//	                         Policy: the document a person wrote, as JSON
//	sessions/NODE            the node's stream: process of the orchestrator, of the agent, stream; with a lease
//	deletions                written in each transaction that deletes: a range compare sees what came, not what went
//	marks/…                  the lowest number never handed out: of prefixes, tenant ids, and with
//	                         marks/published/NODE the index of a publication at the node's gateway; in marks/overlay/…
//	                         where to go on in a tenant's CIDR, in marks/app/… among
//	                         its apps' numbers, and in marks/asked-app/… which of them to ask nodes about next
package store
