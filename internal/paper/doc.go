// Package paper draws figures 7, 9 to 12 and 16 to 18 and table 1 of the NETPILA and NIMITZ paper again, with what runs
// on one machine, beside what the paper's text says of them (NM4, NM7, NM8, NM9, NP9, NP10).
//
//	Form     the sizes that are run
//	Draw     runs what the chosen figures need, each thing once, and makes them
//	Figure   data, and in words what was run and why it is not as in the paper
//	Folder   where figures are kept as JSON and TSV, and the page of all that are there
//
// It measures nothing itself: clusters are package sim's, the offloading is package nic's model, switches and packets
// are package bench's. What is the paper's is read off its text, with the section, and never off a drawing.
package paper
