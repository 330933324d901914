return forget_holder(take())
